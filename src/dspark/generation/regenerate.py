"""Answers of the target to prompts from files: what a drafter is trained on."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.data.sources import Prompt, read_prompts
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, SamplingParams
from dspark.errors import DsparkError
from dspark.generation.config import RegenerateSettings
from dspark.generation.journal import Journal
from dspark.generation.stream import draw, draw_integer, run_tasks
from dspark.log import get_logger, progress

_log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class RegenerationReport:
    """What a run did: rows in the file at its end, rows and answer tokens of this run, and prompts it left out."""

    total: int
    written: int
    num_tokens: int
    refused: int


def regenerate(engine: Engine, settings: RegenerateSettings) -> RegenerationReport:
    """Append {"id", "source", "messages", "finished", "temperature"} to `settings.out` for each prompt not yet there.

    Rows are written as the engine finishes them, so their order is that of finishing. A prompt's temperature, suffix
    and random numbers depend on the seed and its id alone. Prompts that cannot be served (too long) are counted and
    left out. Raises `ConfigError` and `DataError`.
    """
    chat = ChatTemplate(engine.target.tokenizer, settings.template_variables)
    prompts = select_prompts(settings)
    written = num_tokens = refused = 0
    with Journal(settings.out, _stamp(engine, settings)) as journal:
        left = [prompt for prompt in prompts if prompt.id not in journal.ids]
        tasks = (_Answering(prompt, chat, settings) for prompt in left)
        with progress(len(prompts), "regenerate", "row", initial=len(prompts) - len(left)) as bar:
            for task in run_tasks(engine, tasks):
                bar.update(1)
                num_tokens += task.num_tokens
                if not task.num_answers:
                    refused += 1
                    _log.warning("%s: left out: %s", task.prompt.id, task.refusal)
                    continue
                journal.append(task.row())
                written += 1
        total = len(journal.ids)
    _log.info("%s: %d rows, %d new with %d tokens; %d refused", settings.out, total, written, num_tokens, refused)
    return RegenerationReport(total, written, num_tokens, refused)


def select_prompts(settings: RegenerateSettings) -> list[Prompt]:
    """The prompts of a run in its order: of each file the first `limit` in an order that the seed decides, mixed."""
    by_file: dict[Path, list[Prompt]] = {}
    for prompt in read_prompts(settings.prompts, settings.skip_bad):
        by_file.setdefault(prompt.path, []).append(prompt)

    def order(prompt: Prompt) -> float:
        return draw(settings.seed, "order", prompt.id)

    chosen = [prompt for prompts in by_file.values() for prompt in sorted(prompts, key=order)[: settings.limit]]
    return sorted(chosen, key=order)


def _stamp(engine: Engine, settings: RegenerateSettings) -> dict[str, Any]:
    """What decides the content of the rows; prompts may be added and the limit raised."""
    fields = {"seed", "temperatures", "top_p", "top_k", "max_tokens", "suffixes", "template_variables"}
    return {"target": engine.target.digest, **settings.model_dump(mode="json", include=fields)}


@dataclass
class _Answering:
    """One conversation under way: each turn is a request of its own."""

    prompt: Prompt
    chat: ChatTemplate
    settings: RegenerateSettings
    messages: list[Message] = field(init=False)
    num_answers: int = 0
    num_tokens: int = 0
    finished: bool = True
    refusal: DsparkError | None = None

    def __post_init__(self) -> None:
        self.messages = [] if self.prompt.system is None else [Message("system", self.prompt.system)]

    @property
    def temperature(self) -> float:
        """The temperature that this prompt drew."""
        weights = self.settings.temperatures
        return _pick(weights.keys(), weights.values(), draw(self.settings.seed, "temperature", self.prompt.id))

    @property
    def turn(self) -> Message:
        """The next user turn, the first one with the suffix that this prompt drew."""
        text = self.prompt.turns[self.num_answers]
        if self.num_answers == 0:
            suffixes = self.settings.suffixes.get(self.prompt.source, ("",))
            text += _pick(suffixes, [1.0] * len(suffixes), draw(self.settings.seed, "suffix", self.prompt.id))
        return Message("user", text)

    def request(self) -> tuple[list[int], SamplingParams]:
        params = SamplingParams(
            max_tokens=self.settings.max_tokens,
            temperature=self.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
            seed=draw_integer(self.settings.seed, "answer", self.prompt.id, self.num_answers),
        )
        return self.chat.prompt_ids((*self.messages, self.turn)), params

    def take(self, completion: Completion) -> bool:
        if completion.finish_reason == "error":
            self.refusal = DsparkError("the target's logits are not finite")
            return True
        self.messages += [self.turn, Message("assistant", completion.text)]
        self.num_answers += 1
        self.num_tokens += len(completion.token_ids)
        self.finished = completion.finish_reason == "stop"
        return not self.finished or self.num_answers == len(self.prompt.turns)

    def refuse(self, error: DsparkError) -> None:
        self.refusal = error

    def row(self) -> dict[str, Any]:
        """The conversation as far as it went, as one line of the output."""
        return {
            "id": self.prompt.id,
            "source": self.prompt.source,
            "messages": [message.as_dict() for message in self.messages],
            "finished": self.finished,
            "temperature": self.temperature,
        }


def _pick(values: Iterable[T], weights: Iterable[float], at: float) -> T:
    """The value in whose share of the weights `at` in [0, 1) lies."""
    values, weights = list(values), list(weights)
    left = at * sum(weights)
    for value, weight in zip(values, weights, strict=True):
        if left < weight:
            return value
        left -= weight
    return values[-1]
