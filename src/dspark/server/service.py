"""What the endpoints share: the engine's thread, its settings, and one way to run a job."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from dspark.errors import DsparkError, OverloadError, RequestError
from dspark.models.tokenizer import Tokenizer
from dspark.server.answers import Answers, EngineGone, Job
from dspark.server.config import ServeSettings
from dspark.server.engine_thread import EngineThread
from dspark.server.errors import ApiError, named_field
from dspark.server.reply import Envelope, Shape, figures, usage
from dspark.server.schemas import SamplingFields
from dspark.server.sse import DONE, ClientGone, EventStream, dumps, event, unless_gone

T = TypeVar("T")

_LONG_TEXT = 1 << 14  # characters: more are tokenised off the event loop


@dataclass
class Service:
    """One model, served."""

    settings: ServeSettings
    engine: EngineThread
    draining: bool = False
    num_requests: int = 0  # HTTP requests for answers that are under way
    started_at: int = field(default_factory=lambda: int(time.time()))
    _tokenising: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self.engine.engine.target.tokenizer

    @property
    def limit(self) -> int:
        """Tokens of prompt and answer together."""
        return self.engine.engine.limit

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model than the one served."""
        if name is not None and name != self.settings.name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; this server has {self.settings.name!r}",
                "model",
                "model_not_found",
            )

    async def tokenise(self, work: Callable[[], T], size: int) -> T:
        """Do what takes time in proportion to `size` characters, away from the event loop if they are many."""
        if size < _LONG_TEXT:
            return work()
        async with self._tokenising:
            return await asyncio.to_thread(work)

    async def answer(self, request: Request, fields: SamplingFields, job: Job, shape: Shape) -> Response:
        """Run a job and answer with it, whole or as a stream. Aborts it as soon as the client has gone."""
        self._check_open()
        envelope = Envelope(job.name, self.settings.name, job)
        self.num_requests += 1
        streams = False
        try:
            answers = await unless_gone(self.engine.submit(job), request.receive)
            if fields.stream:
                streams = True
                wants_usage = fields.stream_options is not None and fields.stream_options.include_usage
                return EventStream(self._events(answers, envelope, shape, wants_usage), lambda: self._close(answers))
            try:
                completions = await unless_gone(answers.all(), request.receive)
            finally:
                self.engine.drop(answers)
        except ClientGone:
            return Response(status_code=499)
        except DsparkError as error:
            raise self._told(error) from None
        finally:
            self.num_requests -= not streams
        return JSONResponse(envelope.whole(shape, completions))

    def _check_open(self) -> None:
        if self.draining:
            raise ApiError(
                503, "the server is shutting down: ask another one", None, "shutting_down", {"connection": "close"}
            )

    def _close(self, answers: Answers) -> None:
        """A stream is over, whatever the reason."""
        self.engine.drop(answers)
        self.num_requests -= 1

    async def _events(
        self, answers: Answers, envelope: Envelope, shape: Shape, wants_usage: bool
    ) -> AsyncIterator[bytes]:
        """The events of a stream; an error ends it as an event of its own."""
        try:
            async for outputs in answers:
                chunks = [
                    envelope.chunk(shape, [piece])
                    for output in outputs
                    for piece in shape.pieces(answers.job.choice(output), output)
                ]
                if answers.finished and not wants_usage:
                    chunks[-1]["speculative"] = figures(answers.completions.values())
                yield b"".join(map(event, chunks))
            if wants_usage:
                done = answers.completions.values()
                last = {"usage": usage(answers.job, done), "speculative": figures(done)}
                yield event(envelope.chunk(shape, []) | last)
            yield DONE
        except DsparkError as error:
            yield b"event: error\ndata: " + dumps(self._told(error).body) + b"\n\n"

    def _told(self, error: DsparkError) -> ApiError:
        """What a client is told of an error of the engine."""
        match error:
            case ApiError():
                return error
            case OverloadError():
                return ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"})
            case RequestError():
                return ApiError(400, str(error), named_field(error, tuple(SamplingFields.model_fields)))
            case EngineGone():
                return ApiError(503, str(error), code="engine_unavailable")
            case _:
                return ApiError(500, str(error), code="internal_error")


def new_name(kind: str) -> str:
    """A request id of the form `kind-…`."""
    return f"{kind}-{secrets.token_hex(12)}"


def check_answers(prompts: Sequence[list[int]], n: int, limit: int) -> None:
    """Raise ApiError for more answers than one request may ask for."""
    if len(prompts) * n > limit:
        raise ApiError(
            400, f"n: {len(prompts)} prompts times n {n} are more than the {limit} answers that a request may have", "n"
        )
