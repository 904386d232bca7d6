"""What answering prompts has in common, whoever answers: which prompts, how each is asked, and the rows written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, TypeVar

from dspark.data.conversation import Message
from dspark.data.journal import Journal
from dspark.data.sources import Prompt, select_prompts
from dspark.draws import draw, draw_integer
from dspark.errors import DsparkError
from dspark.files import json_line
from dspark.generation.config import RegenerateSettings
from dspark.log import get_logger, progress

if TYPE_CHECKING:
    from tqdm import tqdm

_log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class RegenerationReport:
    """What a run did: rows in the file at its end, rows and answer tokens of this run, and prompts it left out."""

    total: int
    written: int
    num_tokens: int
    refused: int


@dataclass
class Answering:
    """One conversation under way, turn by turn; all of it but the answers follows from the settings and the id."""

    prompt: Prompt
    settings: RegenerateSettings
    messages: list[Message] = field(init=False)
    num_answers: int = 0
    num_tokens: int = 0
    finished: bool = True

    def __post_init__(self) -> None:
        self.messages = [] if self.prompt.system is None else [Message("system", self.prompt.system)]

    @property
    def temperature(self) -> float:
        """The temperature that this prompt drew."""
        weights = self.settings.temperatures
        return _pick(weights.keys(), weights.values(), draw(self.settings.seed, "temperature", self.prompt.id))

    @property
    def seed(self) -> int:
        """Seed of the next answer's random numbers, in [0, 2**64)."""
        return draw_integer(self.settings.seed, "answer", self.prompt.id, self.num_answers)

    @property
    def turn(self) -> Message:
        """The next user turn, the first one with the suffix that this prompt drew."""
        text = self.prompt.turns[self.num_answers]
        if self.num_answers == 0:
            suffixes = self.settings.suffixes.get(self.prompt.source, ("",))
            text += _pick(suffixes, [1.0] * len(suffixes), draw(self.settings.seed, "suffix", self.prompt.id))
        return Message("user", text)

    def add(self, answer: Message, num_tokens: int, finished: bool) -> bool:
        """Take the answer to `turn`; say whether the conversation is over, as it is after an answer that was cut."""
        self.messages += [self.turn, answer]
        self.num_answers += 1
        self.num_tokens += num_tokens
        self.finished = finished
        return not finished or self.num_answers == len(self.prompt.turns)

    def row(self) -> dict[str, Any]:
        """The conversation as far as it went, as one line of the output."""
        return {
            "id": self.prompt.id,
            "source": self.prompt.source,
            "messages": [message.as_dict() for message in self.messages],
            "finished": self.finished,
            "temperature": self.temperature,
        }


@dataclass
class Answers:
    """The files of a run: a journal of the rows, and beside it the prompts that were given up on.

    `left` are the prompts still to be answered, in the run's order. Prompts given up on are tried again by the next
    run, which begins their file anew.
    """

    journal: Journal
    left: list[Prompt]
    bar: tqdm[Never]
    written: int = 0
    num_tokens: int = 0
    refused: int = 0

    @property
    def errors(self) -> Path:
        """The file of the prompts given up on."""
        return self.journal.path.with_suffix(".errors.jsonl")

    def write(self, task: Answering) -> None:
        """Write the row of a conversation that is over; once this returns, a kill does not lose it."""
        self.journal.append(task.row())
        self.written += 1
        self._count(task)

    def give_up(self, task: Answering, error: DsparkError) -> None:
        """Note a conversation that is not written, and why."""
        _log.warning("%s: left out: %s", task.prompt.id, error)
        with self.errors.open("ab") as file:
            file.write(json_line({"id": task.prompt.id, "source": task.prompt.source, "error": str(error)}))
        self.refused += 1
        self._count(task)

    def report(self) -> RegenerationReport:
        """Log and return what was done."""
        path, total = self.journal.path, len(self.journal.ids)
        _log.info("%s: %d rows, %d new with %d tokens", path, total, self.written, self.num_tokens)
        if self.refused:
            _log.warning("%d prompts left out: see %s; run again to retry them", self.refused, self.errors)
        return RegenerationReport(total, self.written, self.num_tokens, self.refused)

    def _count(self, task: Answering) -> None:
        self.num_tokens += task.num_tokens
        self.bar.update(1)


@contextmanager
def open_answers(settings: RegenerateSettings, target: str) -> Iterator[Answers]:
    """Open the files of a run, a new one or one that was cut off; `target` identifies who answers.

    Raises `ConfigError` when the rows there came from other settings, and `DataError` for malformed prompts.
    """
    prompts = select_prompts(settings.prompts, settings.limit, settings.seed, settings.skip_bad)
    with Journal(settings.out, _stamp(target, settings)) as journal:
        left = [prompt for prompt in prompts if prompt.id not in journal.ids]
        with progress(len(prompts), "regenerate", "row", initial=len(prompts) - len(left)) as bar:
            answers = Answers(journal, left, bar)
            answers.errors.unlink(missing_ok=True)
            yield answers


def _stamp(target: str, settings: RegenerateSettings) -> Mapping[str, Any]:
    """What decides the content of the rows; prompts may be added and the limit raised."""
    fields = {"seed", "temperatures", "top_p", "top_k", "max_tokens", "suffixes", "template_variables"}
    return {"target": target, **settings.model_dump(mode="json", include=fields)}


def _pick(values: Iterable[T], weights: Iterable[float], at: float) -> T:
    """The value in whose share of the weights `at` in [0, 1) lies."""
    values, weights = list(values), list(weights)
    left = at * sum(weights)
    for value, weight in zip(values, weights, strict=True):
        if left < weight:
            return value
        left -= weight
    return values[-1]
