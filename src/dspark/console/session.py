"""Loading the pair of models and timing what they put out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from dspark.console.config import AnswerOptions, ModelOptions
from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.drafters.layouts.deepspec import read_drafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine, StepOutput
from dspark.engine.request import Completion, SamplingParams
from dspark.errors import CheckpointError, RequestError
from dspark.models.target import Target, load_target

SHIPPED_DRAFTERS = {"smollm2-135m": "smollm2-135m-dspark"}
COMPARE_TOKENS = 32


@dataclass(frozen=True)
class Timed:
    """A finished answer and how long it took, prefill included."""

    completion: Completion
    seconds: float
    decode_seconds: float  # without the step that prefilled

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the decode rounds."""
        return (len(self.completion.token_ids) - 1) / self.decode_seconds if self.decode_seconds else 0.0


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
        if not self.target.tokenizer.chat_template:
            return self.text_ids("\n".join(m["content"] for m in messages))
        return ChatTemplate(self.target.tokenizer).prompt_ids([Message(m["role"], m["content"]) for m in messages])

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
        completion: Completion | None = None
        try:
            for output in self._steps(request_id):
                if first == start:
                    first = time.perf_counter()
                if show is not None:
                    show(output)
                completion = output.completion
        except KeyboardInterrupt:
            completion = self.engine.abort(request_id)
        assert completion is not None
        end = time.perf_counter()
        return Timed(completion, end - start, end - first)

    def plain_speed(self, prompt_ids: list[int], params: SamplingParams) -> float:
        """Tokens per second of plain decoding on the same prompt, over a few tokens."""
        plain = params.replace(speculate=False, max_tokens=COMPARE_TOKENS, ignore_eos=True, stop=())
        return self.answer(prompt_ids, plain).tokens_per_second

    def _steps(self, request_id: str) -> Iterator[StepOutput]:
        while self.engine.has_work():
            for output in self.engine.step():
                if output.request_id == request_id:
                    yield output


def open_session(options: ModelOptions, max_batch: int = 1) -> Session:
    """Load target and drafter as the options say, for `max_batch` requests at once.

    Raises CheckpointError naming what does not fit.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    target = load_target(options.target, options.dtype)
    path = drafter_path(options)
    drafter = None if path is None else read_drafter(path, target.decoder, target.digest).prepare()
    settings = EngineSettings(max_batch=max_batch, max_length=4096, num_draft_tokens=options.num_draft_tokens)
    return Session(target, Engine(target, drafter, settings))


def drafter_path(options: ModelOptions) -> Path | None:
    """Where the drafter's files are, or None for plain decoding."""
    if options.drafter == "none":
        return None
    if options.drafter != "auto":
        path = Path(options.drafter)
        if not path.is_dir():
            raise CheckpointError(f"drafter {path}: no such directory; give a drafter checkpoint, auto or none")
        return path
    name = SHIPPED_DRAFTERS.get(options.target)
    if name is None:
        return None
    path = Path(str(resources.files("dspark") / "assets" / name))
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: the shipped drafter is missing; reinstall dspark or pass --drafter none")
    return path


def sampling_params(options: AnswerOptions) -> SamplingParams:
    """The engine's parameters for the command line's."""
    return SamplingParams(**options.model_dump())
