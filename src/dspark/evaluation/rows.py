"""What a run asks and what it writes: one row for each prompt, setting and way of decoding. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

from dspark.data.sources import Prompt
from dspark.engine.request import RoundRecord
from dspark.errors import DataError
from dspark.evaluation.tasks import Task


class Setting(NamedTuple):
    """How prompts are answered: a temperature (0 = greedy) and the template's thinking mode (None: left alone)."""

    temperature: float
    thinking: bool | None = None

    @property
    def label(self) -> str:
        """For tables and plots."""
        name = "greedy" if self.temperature == 0 else f"T={self.temperature:g}"
        return name if self.thinking is None else f"{name}, thinking {'on' if self.thinking else 'off'}"


@dataclass(frozen=True)
class Case:
    """One prompt of a task in one setting; it makes a drafted row, and a plain one where speeds are compared."""

    task: str
    category: str
    prompt: Prompt
    setting: Setting

    def row_id(self, drafted: bool) -> str:
        """The same in every run over the same words, in the same setting."""
        temperature, thinking = self.setting
        mode = {None: "", True: "/think", False: "/no-think"}[thinking]
        return f"{self.prompt.id}/t{temperature:g}{mode}/{'drafted' if drafted else 'plain'}"


class Seconds(NamedTuple):
    """The time an answer took: of each step that it took part in, the step's time over the requests in the step.

    Summed over requests that ran together it is the time that passed, whatever the batch.
    """

    prefill: float = 0.0
    decode: float = 0.0


NO_TIME = Seconds()


@dataclass(frozen=True)
class Row:
    """The answers to one prompt, turn after turn. `error` says why there are none."""

    id: str
    task: str
    category: str
    prompt: str  # its id
    setting: Setting
    drafted: bool
    prompt_script: str = ""
    answer_script: str = ""
    prompt_tokens: int = 0  # of all turns, each with what stands before it
    tokens: int = 0  # new ones
    decoded: int = 0  # of them from decode rounds; the others came with a prefill
    seconds: Seconds = NO_TIME
    texts: tuple[str, ...] = ()
    finish: tuple[str, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    error: str | None = None

    @property
    def pair(self) -> tuple[str, Setting]:
        """What a row has in common with those it is compared with."""
        return self.prompt, self.setting

    def as_dict(self) -> dict[str, Any]:
        """The row of the file; a round is [position, verify_len, num_drafts, correct_len, num_output, [logits]]."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "setting"}
        rounds = [[*r[:5], [round(logit, 4) for logit in r.confidence_logits]] for r in self.rounds]
        return values | self.setting._asdict() | {"seconds": self.seconds._asdict(), "rounds": rounds}

    @classmethod
    def from_dict(cls, row: dict[str, Any], where: str) -> Self:
        """What `as_dict` gave, read back. Raises `DataError` naming `where` for anything else."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
        }
        try:
            values["setting"] = Setting(values.pop("temperature"), values.pop("thinking"))
            values["seconds"] = Seconds(**values["seconds"])
            values["rounds"] = tuple(RoundRecord(*(*r[:5], tuple(r[5]))) for r in values["rounds"])
            return cls(**values)
        except (KeyError, TypeError, IndexError):
            raise DataError(f"{where}: not a row of `dspark eval`: name a directory that it wrote") from None


def make_cases(tasks: Iterable[Task], settings: Iterable[Setting]) -> list[Case]:
    """Every prompt in every setting, task by task."""
    settings = list(settings)
    return [Case(t.name, t.category, prompt, s) for t in tasks for s in settings for prompt in t.prompts]
