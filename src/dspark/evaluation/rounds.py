"""Full-width rounds of a drafter on given prompts, through the engine; kept in a journal, so that a run resumes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.data.journal import Journal
from dspark.data.sources import Prompt
from dspark.draws import draw_integer
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, RoundRecord, SamplingParams
from dspark.engine.stream import run_tasks
from dspark.errors import DsparkError
from dspark.evaluation.config import CalibrateOptions
from dspark.log import get_logger, progress

_log = get_logger(__name__)
_DIGITS = 6  # of a confidence logit in the journal


class AnsweredPrompt(NamedTuple):
    """The rounds of one prompt's answer at one temperature.

    Rounds that the end of the answer cut short are left out and counted: where they stand depends on no confidence. A
    round that a planner trimmed stays in, for the fit to refuse.
    """

    prompt_id: str
    temperature: float
    rounds: tuple[RoundRecord, ...]
    num_end_rounds: int


def collect(engine: Engine, prompts: list[Prompt], options: CalibrateOptions, path: Path) -> list[AnsweredPrompt]:
    """Answer the first turn of every prompt at every temperature; rows already in the journal at `path` are taken.

    Prompts that cannot be served (too long) are left out with a warning. Raises ConfigError when the journal was begun
    with other settings, target or drafter.
    """
    assert engine.drafter is not None
    pair = {"target": engine.target.digest, "drafter": engine.drafter.digest, "dtype": str(engine.drafter.dtype)}
    stamp = pair | options.model_dump(mode="json", include={"max_tokens", "max_length", "seed"})
    wanted = {_row_id(prompt, temperature) for prompt in prompts for temperature in options.temperatures}
    with Journal(path, stamp) as journal:
        rows = [row for row in journal.rows if row["id"] in wanted]
        template = ChatTemplate(engine.target.tokenizer)
        left = (
            _Asking(prompt, temperature, options, template, engine.limit)
            for prompt in prompts
            for temperature in options.temperatures
            if _row_id(prompt, temperature) not in journal.ids
        )
        with progress(len(wanted), "rounds", "answer", initial=len(rows)) as bar:
            for row in _answer(engine, left):
                bar.update(1)
                if row is not None:
                    journal.append(row)
                    rows.append(row)
    return [_answered(row) for row in sorted(rows, key=lambda row: str(row["id"]))]


def _answer(engine: Engine, tasks: Iterable[_Asking]) -> Iterator[dict[str, Any] | None]:
    """The journal's row of each task that is done, or None where it could not be served."""
    for task in run_tasks(engine, tasks):
        if task.error is not None:
            _log.warning("%s: left out: %s", task.prompt.id, task.error)
        yield task.row


@dataclass
class _Asking:
    """One prompt to be answered at one temperature; `row` is what the journal keeps of it."""

    prompt: Prompt
    temperature: float
    options: CalibrateOptions
    template: ChatTemplate
    limit: int
    row: dict[str, Any] | None = None
    error: DsparkError | None = None

    def request(self) -> tuple[list[int], SamplingParams]:
        seed = draw_integer(self.options.seed, "answer", self.prompt.id, self.temperature)
        params = SamplingParams(max_tokens=self.options.max_tokens, temperature=self.temperature, seed=seed)
        return self.template.prompt_ids_or_plain(_messages(self.prompt)), params

    def take(self, completion: Completion) -> bool:
        if completion.finish_reason == "error":
            self.refuse(DsparkError("the target's logits are not finite"))
            return True
        ends = [ends_answer(record, completion, self.options.max_tokens, self.limit) for record in _rounds(completion)]
        rounds = [record for record, end in zip(_rounds(completion), ends, strict=True) if not end]
        self.row = {
            "id": _row_id(self.prompt, self.temperature),
            "prompt": self.prompt.id,
            "temperature": self.temperature,
            "rounds": [[*r[:-1], [round(logit, _DIGITS) for logit in r.confidence_logits]] for r in rounds],
            "end_rounds": sum(ends),
        }
        return True

    def refuse(self, error: DsparkError) -> None:
        self.error = error


def ends_answer(record: RoundRecord, completion: Completion, max_tokens: int, limit: int) -> bool:
    """Whether a round verified fewer drafts because the answer may not become longer, not because a planner cut it.

    limit: tokens of prompt and answer together, at most.
    """
    told = record.position + 1 - len(completion.prompt_ids)
    wanted = min(max_tokens, limit - len(completion.prompt_ids)) - told
    return not record.is_full_width and record.verify_len == max(1, min(wanted, limit - record.position))


def _rounds(completion: Completion) -> list[RoundRecord]:
    return [record for record in completion.round_records if record.num_drafts]


def _messages(prompt: Prompt) -> list[Message]:
    system = [] if prompt.system is None else [Message("system", prompt.system)]
    return [*system, Message("user", prompt.turns[0])]


def _row_id(prompt: Prompt, temperature: float) -> str:
    return f"{prompt.id}@{temperature:g}"


def _answered(row: dict[str, Any]) -> AnsweredPrompt:
    rounds = tuple(RoundRecord._make([*fields, tuple(logits)]) for *fields, logits in row["rounds"])
    return AnsweredPrompt(row["prompt"], row["temperature"], rounds, row["end_rounds"])
