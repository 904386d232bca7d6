"""Asking a pair of models everything a run wants to know: in batches, written row by row, shared among processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.data.journal import Journal
from dspark.draws import draw_integer
from dspark.engine.engine import Engine, StepOutput
from dspark.engine.request import Completion, SamplingParams
from dspark.engine.stream import run_tasks
from dspark.errors import DsparkError, RequestError
from dspark.evaluation.config import MeasureOptions
from dspark.evaluation.results import ROWS
from dspark.evaluation.rows import Case, Row, Seconds
from dspark.evaluation.script import script
from dspark.log import progress
from dspark.training.parallel import Ranks

if TYPE_CHECKING:
    from tqdm import tqdm

BATCHES_A_BLOCK = 2  # then plain decoding takes its turn: short enough to see the machine in the same state
WARM_UP = SamplingParams(max_tokens=8, ignore_eos=True, seed=0)


@dataclass
class Answering:
    """A case on its way through the engine, turn by turn."""

    case: Case
    drafted: bool
    options: MeasureOptions
    chat: ChatTemplate
    limit: int  # positions that the engine has
    completions: list[Completion] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    error: str | None = None

    def request(self) -> tuple[list[int], SamplingParams]:
        """The next turn, after all that was said before. Raises RequestError where the answer has no room."""
        prompt, turn = self.case.prompt, len(self.completions)
        messages = [] if prompt.system is None else [Message("system", prompt.system)]
        for text, completion in zip(prompt.turns, self.completions, strict=False):
            messages += [Message("user", text), Message("assistant", completion.text)]
        ids = self.chat.prompt_ids_or_plain([*messages, Message("user", prompt.turns[turn])])
        if len(ids) + self.options.tokens > self.limit:
            raise RequestError(f"{len(ids)} tokens and {self.options.tokens} new ones exceed the {self.limit} allowed")
        return ids, SamplingParams(
            max_tokens=self.options.tokens,
            temperature=self.case.setting.temperature,
            seed=draw_integer(self.options.seed, prompt.id, turn),
            speculate=self.drafted,
        )

    def spend(self, seconds: float, output: StepOutput) -> None:
        """Take this answer's share of a step."""
        if output.origins and output.origins[0] == "prefill":
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds

    def take(self, completion: Completion) -> bool:
        """Take a turn's answer; say whether it was the last."""
        if completion.finish_reason == "error":
            self.error = "the target's logits are not finite"
            return True
        self.completions.append(completion)
        return len(self.completions) == len(self.case.prompt.turns)

    def refuse(self, error: DsparkError) -> None:
        """The next turn does not fit: what was answered before it counts."""
        if not self.completions:
            self.error = str(error)

    def row(self) -> Row:
        """What is written."""
        case, done = self.case, self.completions
        head = (case.row_id(self.drafted), case.task, case.category, case.prompt.id, case.setting, self.drafted)
        if self.error is not None:
            return Row(*head, error=self.error)
        return Row(
            *head,
            prompt_script=script("".join(case.prompt.turns)),
            answer_script=script("".join(c.text for c in done)),
            prompt_tokens=sum(len(c.prompt_ids) for c in done),
            tokens=sum(len(c.token_ids) for c in done),
            decoded=sum(origin != "prefill" for c in done for origin in c.origins),
            seconds=Seconds(round(self.prefill_seconds, 6), round(self.decode_seconds, 6)),
            texts=tuple(c.text for c in done),
            finish=tuple(c.finish_reason for c in done),
            rounds=tuple(record for c in done for record in c.round_records),
        )


def run(
    engine: Engine, cases: Sequence[Case], options: MeasureOptions, out: Path, stamp: Mapping[str, Any], ranks: Ranks
) -> list[Row]:
    """Answer what earlier runs into `out` did not, and return every row of `cases`, the same on all processes.

    A row is on disk when its answer is whole; a killed run goes on where it stopped, with any number of processes.
    Raises `ConfigError` when the rows there came from other settings.
    """
    if ranks.is_main:
        absorb(out, stamp)
    ranks.wait()
    path = journal_path(out, ranks.rank)
    wanted = [case.row_id(drafted) for case in cases for drafted in modes(options)]
    with Journal(path, stamp) as journal, ExitStack() as stack:
        known = {row["id"]: row for row in journal.rows}
        done = set[str]().union(*ranks.gather(list(known)))
        mine = deal(cases, options, done, ranks)
        bar = stack.enter_context(_bar(mine, options, done)) if ranks.is_main else None
        warm_up(engine, mine)
        for row in answers(engine, mine, options, done, bar):
            known[row.id] = row.as_dict()
            journal.append(known[row.id])
        everything = {name: row for part in ranks.gather(known) for name, row in part.items()}
        if ranks.is_main:
            for name in everything.keys() - journal.ids:
                journal.append(everything[name])
    ranks.wait()
    if not ranks.is_main:
        remove(path)
    return [Row.from_dict(everything[name], str(out / ROWS)) for name in wanted]


def modes(options: MeasureOptions) -> tuple[bool, ...]:
    """With speculation, and plainly where that is asked for."""
    return (True, False) if options.plain else (True,)


def deal(cases: Sequence[Case], options: MeasureOptions, done: set[str], ranks: Ranks) -> list[Case]:
    """The cases of this process: of those with a row to write, every so many-th, so that tasks are spread evenly."""
    left = [case for case in cases if any(case.row_id(drafted) not in done for drafted in modes(options))]
    return left[ranks.rank :: ranks.world_size]


def answers(
    engine: Engine, cases: Sequence[Case], options: MeasureOptions, done: set[str], bar: tqdm[Never] | None = None
) -> Iterator[Row]:
    """Yield the rows that are not done, each as soon as its answer is whole.

    A block of cases is answered with speculation, then plainly, so that both are timed under the same conditions.
    """
    templates = {thinking: chat_of(engine, thinking) for thinking in {case.setting.thinking for case in cases}}

    def share(seconds: float, outputs: list[tuple[Answering, StepOutput]]) -> None:
        for task, output in outputs:
            task.spend(seconds / len(outputs), output)

    for block in blocks(cases, BATCHES_A_BLOCK * options.batch):
        for drafted in modes(options):
            asked = [
                Answering(case, drafted, options, templates[case.setting.thinking], engine.limit)
                for case in block
                if case.row_id(drafted) not in done
            ]
            for task in run_tasks(engine, asked, share):
                yield task.row()
                if bar is not None:
                    bar.update(1)


def blocks(cases: Sequence[Case], size: int) -> Iterator[list[Case]]:
    """Blocks of cases of one task and setting; tasks take turns, so that a run that is cut off has some of each."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.task, case.setting), []).append(case)
    columns = [[group[i : i + size] for i in range(0, len(group), size)] for group in groups.values()]
    for row in zip_longest(*columns):
        yield from (block for block in row if block is not None)


def chat_of(engine: Engine, thinking: bool | None) -> ChatTemplate:
    """The target's chat template in a thinking mode."""
    return ChatTemplate(engine.target.tokenizer, {} if thinking is None else {"enable_thinking": thinking})


def warm_up(engine: Engine, cases: Sequence[Case]) -> None:
    """Decode a few tokens both ways, so that first calls are not timed."""
    if cases:
        ids = chat_of(engine, None).prompt_ids_or_plain([Message("user", "Hello")])
        for speculate in (True, False):
            engine.generate([ids], WARM_UP.replace(speculate=speculate))


def journal_path(out: Path, rank: int) -> Path:
    """The rows of the main process, which are the run's in the end, or of another one."""
    return out / ROWS if rank == 0 else out / f"rows.rank{rank}.jsonl"


def absorb(out: Path, stamp: Mapping[str, Any]) -> None:
    """Take over what other processes of a run that was cut off have written."""
    for path in sorted(out.glob("rows.rank*.jsonl")):
        with Journal(path, stamp) as left, Journal(out / ROWS, stamp) as journal:
            for row in left.rows:
                if row["id"] not in journal.ids:
                    journal.append(row)
        remove(path)


def remove(path: Path) -> None:
    """Delete a journal that has been taken over, and its settings."""
    path.unlink()
    path.with_suffix(".settings.json").unlink()


def _bar(cases: Sequence[Case], options: MeasureOptions, done: set[str]) -> tqdm[Never]:
    ids = [case.row_id(drafted) for case in cases for drafted in modes(options)]
    return progress(len(ids), "eval", "answer", initial=sum(name in done for name in ids))
