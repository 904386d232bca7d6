"""`/v1/completions`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from fastapi import APIRouter, Request, Response

from dspark.engine.engine import StepOutput
from dspark.engine.request import Completion, SamplingParams, TokenLogprob
from dspark.models.tokenizer import Tokenizer
from dspark.server.answers import Job, new_name
from dspark.server.chat_shape import without_end
from dspark.server.errors import bad_request
from dspark.server.prompts import text_ids
from dspark.server.reply import Json
from dspark.server.run_job import run_job
from dspark.server.sampling import sampling_params
from dspark.server.schemas import CompletionRequest
from dspark.server.service import Service
from dspark.server.token_texts import OriginTexts, TokenTexts

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue texts."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    prompts = await prompts_of(service, body)
    service.check_prompts(prompts, body.n, "prompt")
    params = sampling_params(
        body,
        service.engine.engine,
        service.settings.limits,
        service.limit - max(map(len, prompts)),
        logprobs=body.logprobs,
    )
    job = Job(new_name("cmpl"), prompts, params, body.priority, bool(body.stream))
    shape = CompletionShape(service.tokenizer, params, service.stop_ids(params), body.speculative.origins)
    return await run_job(request, body, job, shape)


async def prompts_of(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt: a text, several, the ids of one, or of several."""
    given = body.prompt
    texts = [given] if isinstance(given, str) else [text for text in given if isinstance(text, str)]
    if texts:
        work = lambda: [text_ids(service.tokenizer, text) for text in texts]  # noqa: E731
        return await service.aside(work, sum(map(len, texts)))
    ids = [entry for entry in given if isinstance(entry, int)]
    prompts = [ids] if ids else [entry for entry in given if isinstance(entry, list)]
    if not prompts:
        raise bad_request("prompt: it is empty; give a text or token ids", "prompt")
    return prompts


class CompletionShape:
    """Choices as text, of one request."""

    kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: Collection[int], origins: bool) -> None:
        self._texts = TokenTexts(tokenizer)
        self._stops = stops
        self._offsets = Counter[int]()
        self._origins = defaultdict[int, OriginTexts](lambda: OriginTexts(tokenizer, params)) if origins else None

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished text."""
        return {
            "index": index,
            "text": completion.text,
            "logprobs": self._logprobs(index, completion.logprobs, completion),
            "finish_reason": completion.finish_reason,
        } | self._listed(index, completion.token_ids, completion)

    def pieces(self, index: int, output: StepOutput) -> Iterator[Json]:
        """The text that is new, and with the last of it the finish reason."""
        completion = output.completion
        logprobs = self._logprobs(index, output.logprobs, completion)
        listed = self._listed(index, output.token_ids, output)
        if output.text_delta or logprobs or listed or completion:
            reason = None if completion is None else completion.finish_reason
            piece = {"index": index, "text": output.text_delta, "logprobs": logprobs, "finish_reason": reason}
            yield piece | listed

    def _logprobs(
        self, index: int, entries: Sequence[TokenLogprob] | None, completion: Completion | None
    ) -> Json | None:
        if entries is None:
            return None
        found = self._texts.plain(without_end(entries, completion, self._stops), self._offsets[index])
        self._offsets[index] += sum(map(len, found["tokens"]))
        return found

    def _listed(self, index: int, token_ids: list[int], source: Completion | StepOutput) -> Json:
        if self._origins is None:
            return {}
        last = isinstance(source, Completion) or source.finished
        return {"tokens": self._origins[index].push(token_ids, source.origins, last)}
