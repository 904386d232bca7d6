"""A pair of models that answers one request at a time, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dspark.console.config import AnswerOptions
from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.engine.config import EngineSettings, ModelOptions, PlanOptions
from dspark.engine.engine import Engine, StepOutput
from dspark.engine.pair import open_engine
from dspark.engine.request import Completion, SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.models.target import Target

COMPARE_TOKENS = 32


@dataclass(frozen=True)
class Timed:
    """The finished answers to one prompt, one unless more were asked for, and how long they took, prefill included."""

    completions: list[Completion]
    seconds: float
    decode_seconds: float  # without the step that prefilled

    @property
    def completion(self) -> Completion:
        """The first answer."""
        return self.completions[0]

    @property
    def num_tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the decode rounds."""
        return (self.num_tokens - len(self.completions)) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Session:
    """An engine with its target, ready to answer one request at a time."""

    target: Target
    engine: Engine

    @property
    def speculates(self) -> bool:
        """Whether a drafter is loaded."""
        return self.engine.drafter is not None

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant begins. Raises RequestError for an empty turn."""
        if not messages[-1]["content"].strip():
            raise RequestError("prompt is empty: write something to answer")
        chat = ChatTemplate(self.target.tokenizer)
        return chat.prompt_ids_or_plain([Message(m["role"], m["content"]) for m in messages])

    def text_ids(self, text: str) -> list[int]:
        """Token ids of plain text. Raises RequestError when it is empty."""
        ids = list(self.target.tokenizer(text)["input_ids"])
        if not ids:
            raise RequestError("prompt is empty: write something to continue")
        return ids

    def answer(
        self, prompt_ids: list[int], params: SamplingParams, show: Callable[[StepOutput], None] | None = None
    ) -> Timed:
        """Answer one prompt, handing each step's output to `show`. Ctrl-C aborts the request and keeps what came."""
        request_id = self.engine.submit(prompt_ids, params)
        start = time.perf_counter()
        first = start
        done: dict[int, Completion] = {}
        try:
            for output in self._steps(request_id):
                if first == start:
                    first = time.perf_counter()
                if show is not None:
                    show(output)
                if output.completion is not None:
                    done[output.index] = output.completion
        except KeyboardInterrupt:
            aborted = self.engine.abort(request_id)
            if aborted is not None:
                done[aborted.index] = aborted
        end = time.perf_counter()
        return Timed([done[index] for index in sorted(done)], end - start, end - first)

    def plain_speed(self, prompt_ids: list[int], params: SamplingParams) -> float:
        """Tokens per second of plain decoding on the same prompt, over a few tokens."""
        plain = params.replace(
            speculate=False,
            n=1,
            max_tokens=COMPARE_TOKENS,
            min_tokens=0,
            stop=(),
            ignore_eos=not params.grammar_fields,  # a grammar has an end
        )
        return self.answer(prompt_ids, plain).tokens_per_second

    def _steps(self, request_id: str) -> Iterator[StepOutput]:
        while self.engine.has_work():
            for output in self.engine.step():
                if output.request_id == request_id:
                    yield output


def open_session(
    options: ModelOptions, max_batch: int = 1, prefix_cache: bool = True, plan: PlanOptions | None = None
) -> Session:
    """Load target and drafter as the options say, for `max_batch` requests at once.

    Raises CheckpointError naming what does not fit, and ConfigError for costs that can not be read.
    """
    settings = EngineSettings(max_batch=max_batch, max_length=4096, prefix_cache=prefix_cache)
    engine = open_engine(options, (plan or PlanOptions()).apply(settings))
    return Session(engine.target, engine)


def sampling_params(options: AnswerOptions) -> SamplingParams:
    """The engine's parameters for the command line's. Raises ConfigError for a schema that can not be read."""
    fields = options.model_dump()
    if options.json_schema is not None:
        try:
            fields["json_schema"] = options.json_schema.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"json_schema {options.json_schema}: cannot be read ({error})") from None
    return SamplingParams.from_dict(fields, "options")
