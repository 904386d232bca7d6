"""One HTTP request for answers, from its job to its last byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from dspark.errors import DsparkError, OverloadError, RequestError
from dspark.server import logs
from dspark.server.answers import Answers, EngineGone, Job
from dspark.server.errors import ApiError
from dspark.server.reply import Envelope, Shape, figures, usage
from dspark.server.sampling import renamed
from dspark.server.schemas import SamplingFields
from dspark.server.service import Service
from dspark.server.sse import DONE, ClientGone, EventStream, dumps, event, unless_gone


async def run_job(request: Request, fields: SamplingFields, job: Job, shape: Shape) -> Response:
    """Run a job and answer with it, whole or as a stream. It is aborted as soon as the client has gone."""
    return await _Run(request, fields, job, shape).response()


class _Run:
    def __init__(self, request: Request, fields: SamplingFields, job: Job, shape: Shape) -> None:
        self.service: Service = request.app.state.service
        self.request = request
        self.fields = fields
        self.job = job
        self.shape = shape
        self.envelope = Envelope(job.name, self.service.settings.name, job)
        self.answers: Answers | None = None
        self.reason = "disconnect"  # why it was dropped, if it was
        self.timer: asyncio.TimerHandle | None = None
        self.details: dict[str, Any] = request.state.log_fields
        self.details |= logs.fields(response=job.name, user=fields.user)["fields"]

    async def response(self) -> Response:
        """The answer. Raises ApiError."""
        service, receive = self.service, self.request.receive
        if service.draining:
            headers = {"connection": "close"}
            raise ApiError(503, "the server is shutting down: ask another one", code="shutting_down", headers=headers)
        service.num_requests += 1
        stream: Response | None = None
        try:
            self.answers = answers = await unless_gone(service.engine.submit(self.job), receive)
            self._set_timer(answers)
            if self.job.streams:
                stream = EventStream(self._events(answers), self._close)
                return stream
            completions = await unless_gone(answers.all(), receive)
            return Response(dumps(self.envelope.whole(self.shape, completions)), media_type="application/json")
        except ClientGone:
            return Response(status_code=499)
        except DsparkError as error:
            raise self._told(error) from None
        finally:
            if stream is None:
                self._close()

    async def _events(self, answers: Answers) -> AsyncIterator[bytes]:
        """The events of a stream; an error ends it as an event of its own."""
        options = self.fields.stream_options
        wants_usage = options is not None and options.include_usage
        try:
            async for outputs in answers:
                chunks = [
                    self.envelope.chunk(self.shape, [piece])
                    for output in outputs
                    for piece in self.shape.pieces(self.job.choice(output), output)
                ]
                if answers.finished and not wants_usage:
                    chunks[-1]["speculative"] = figures(answers.completions.values())
                if chunks:
                    yield b"".join(map(event, chunks))
            if wants_usage:
                done = answers.completions.values()
                last = {"usage": usage(self.job, done), "speculative": figures(done)}
                yield event(self.envelope.chunk(self.shape, []) | last)
            yield DONE
        except DsparkError as error:
            yield b"event: error\ndata: " + dumps(self._told(error).body) + b"\n\n"

    def _set_timer(self, answers: Answers) -> None:
        limit = self.service.settings.limits.request_seconds
        if limit is not None:
            error = ApiError(504, f"the request took longer than the {limit:g} s that one may", code="timeout")
            self.timer = asyncio.get_running_loop().call_later(limit, answers.fail, error)

    def _close(self) -> None:
        """It is over, whatever the reason: abort what still runs, and write down what came of it."""
        self.service.num_requests -= 1
        if self.timer is not None:
            self.timer.cancel()
        if self.answers is None:
            return
        self.service.engine.drop(self.answers)
        done = self.answers.completions.values()
        if not self.answers.finished:
            self.service.metrics.count_dropped(self.reason)
            self.details["dropped"] = self.reason
        speculation = figures(done)
        self.details["prompt_tokens"] = usage(self.job, done)["prompt_tokens"]
        self.details["completion_tokens"] = self.answers.num_tokens  # those of answers that were cut off too
        self.details |= {name: speculation[name] for name in ("rounds", "accepted_length", "first_token_seconds")}
        self.details["finish"] = ",".join(sorted({completion.finish_reason for completion in done}))

    def _told(self, error: DsparkError) -> ApiError:
        """What the client is told of an error."""
        match error:
            case ApiError():
                told = error
            case OverloadError():
                retry = {"retry-after": str(self.service.retry_seconds)}
                told = ApiError(429, str(error), code="queue_full", headers=retry)
            case RequestError():
                told = renamed(ApiError(400, str(error)), self.fields)
            case EngineGone():
                told = ApiError(503, str(error), code="engine_unavailable")
            case _:
                told = ApiError(500, str(error), code="internal_error")
        self.reason = told.code or "error"
        return told
