"""How chat completions write their choices: messages, calls of tools, log probabilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from dspark.engine.engine import StepOutput
from dspark.engine.request import Completion, FinishReason, SamplingParams, TokenLogprob
from dspark.models.tokenizer import Tokenizer
from dspark.server.reply import Json
from dspark.server.token_texts import OriginTexts, TokenTexts
from dspark.server.tool_reader import ToolReader
from dspark.server.tools import ToolUse


class ChatShape:
    """Choices as messages, of one request."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, use: ToolUse, stops: Collection[int], origins: bool
    ) -> None:
        self._texts = TokenTexts(tokenizer)
        self._use = use
        self._stops = stops
        self._readers: dict[int, ToolReader] = {}
        self._origins = defaultdict[int, OriginTexts](lambda: OriginTexts(tokenizer, params)) if origins else None

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished message."""
        reader = ToolReader(self._use)
        words, calls = reader.push(completion.text, last=True)
        message: Json = {"role": "assistant", "content": words or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs, completion),
            "finish_reason": _reason(completion.finish_reason, reader),
        } | self._listed(index, completion.token_ids, completion)

    def pieces(self, index: int, output: StepOutput) -> Iterator[Json]:
        """The role first, then words and calls, and at the end the finish reason alone."""
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = ToolReader(self._use)
            yield _piece(index, {"role": "assistant", "content": ""})
        words, calls = reader.push(output.text_delta, last=output.finished)
        logprobs = self._logprobs(output.logprobs, output.completion)
        listed = self._listed(index, output.token_ids, output)
        if words or listed or (logprobs and logprobs["content"]):
            yield _piece(index, {"content": words} if words else {}) | {"logprobs": logprobs} | listed
        if calls:
            yield _piece(index, {"tool_calls": calls})
        if output.completion is not None:
            yield _piece(index, {}, _reason(output.completion.finish_reason, reader))

    def _logprobs(self, entries: Sequence[TokenLogprob] | None, completion: Completion | None) -> Json | None:
        """Those of the tokens that are text: the one that ends the answer is none."""
        if entries is None:
            return None
        return self._texts.chat(without_end(entries, completion, self._stops))

    def _listed(self, index: int, token_ids: list[int], source: Completion | StepOutput) -> Json:
        """The tokens with their origins, if they are asked for."""
        if self._origins is None:
            return {}
        last = isinstance(source, Completion) or source.finished
        return {"tokens": self._origins[index].push(token_ids, source.origins, last)}


def without_end(
    entries: Sequence[TokenLogprob], completion: Completion | None, stops: Collection[int]
) -> Sequence[TokenLogprob]:
    """The entries without that of a stop token which ended the answer."""
    ended = completion is not None and completion.finish_reason == "stop" and entries
    return entries[:-1] if ended and entries[-1].token_id in stops else entries


def _reason(reason: FinishReason, reader: ToolReader) -> str:
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


def _piece(index: int, delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
