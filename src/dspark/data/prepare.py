"""Prompt files from public or local sets: fields mapped, duplicates and evaluation texts dropped, some held out."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dspark.data.config import PrepareSettings, PromptSet
from dspark.data.conversation import Message, parse_conversation
from dspark.data.fields import text
from dspark.data.rows import fill, read_rows
from dspark.data.sources import Exclusions, asked, normalise
from dspark.draws import draw
from dspark.errors import DataError
from dspark.files import atomic_path, json_line
from dspark.log import get_logger, progress

_log = get_logger(__name__)

_FORMS = ("messages", "conversations", "turns")
REPORT = "report.json"


class Dropped(StrEnum):
    """Why a row gives no prompt."""

    MALFORMED = "malformed"
    EMPTY = "no user turn"
    DUPLICATE = "duplicate"
    EXCLUDED = "repeats an excluded text"


class Prompt(NamedTuple):
    """What a row asks."""

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None

    def as_dict(self) -> dict[str, Any]:
        """The row of a prompt file."""
        head = {"id": self.id, "source": self.source}
        if self.system is None:
            return head | {"turns": list(self.turns)}
        messages = [Message("system", self.system), *(Message("user", turn) for turn in self.turns)]
        return head | {"messages": [message.as_dict() for message in messages]}


@dataclass
class SetReport:
    """What became of one set: prompts for training, prompts held out, and rows dropped by reason."""

    train: int = 0
    held_out: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)

    def as_dict(self, files: list[Path]) -> dict[str, Any]:
        """The counts, and the names of the files written."""
        return {
            "train": self.train,
            "held_out": self.held_out,
            "dropped": dict(self.dropped),
            "files": [path.name for path in files],
        }


def prepare(settings: PrepareSettings) -> dict[str, SetReport]:
    """Write `NAME.jsonl` and, where some are held out, `NAME.held-out.jsonl` of each set, and a report of the counts.

    Rows are {"id", "source", "turns"}, or "messages" where there is a system message. All files appear when the last
    set is read, or none does; those of an earlier run are replaced. Raises `ConfigError`, and `DataError` for rows that
    cannot be read and for files in the way that no earlier run wrote.
    """
    paths = {part.name: _paths(settings, part.name) for part in settings.sets}
    earlier = _earlier_files(settings.out)
    if strange := [path for files in paths.values() for path in files if path.exists() and path.name not in earlier]:
        raise DataError(f"{strange[0]}: is there, and no earlier run wrote it: choose another out")
    screen = _Screen(settings)
    with ExitStack() as stack:
        for part in settings.sets:
            train, *held_out = [_open(stack, path) for path in paths[part.name]]
            for row, is_held_out in screen.prompts(part):
                (held_out[0] if is_held_out else train).write(json_line(row))
        for name in earlier - {path.name for files in paths.values() for path in files}:
            (settings.out / name).unlink(missing_ok=True)  # else a prompt held out there may now be trained on
        _write_report(settings, paths, screen.reports)  # first: it says that the files which now appear are ours
    for name, report in screen.reports.items():
        dropped = "; ".join(f"{number} {reason}" for reason, number in report.dropped.items()) or 0
        _log.info("%s: %d prompts, %d held out; dropped: %s", name, report.train, report.held_out, dropped)
    return screen.reports


class _Screen:
    """Decides row by row which prompts are kept, which of those are held out, and counts."""

    def __init__(self, settings: PrepareSettings) -> None:
        self._settings = settings
        self._excluded = Exclusions.read(settings.exclude)
        self._seen: set[bytes] = set()
        self.reports = {part.name: SetReport() for part in settings.sets}

    def prompts(self, part: PromptSet) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield (the row to write, whether it is held out) of a set, up to its limit."""
        report = self.reports[part.name]
        with progress(part.limit, part.name, "prompt") as bar:
            for row in read_set(part, self._settings.skip_bad, report.dropped):
                key = "\n".join(map(normalise, row.turns))
                dropped = self._judge(row, key)
                if dropped is not None:
                    report.dropped[dropped] += 1
                    continue
                held_out = draw(self._settings.seed, "held out", key) < self._settings.held_out
                report.held_out += held_out
                report.train += not held_out
                bar.update(1)
                yield row.as_dict(), held_out
                if report.train + report.held_out == part.limit:
                    return

    def _judge(self, row: Prompt, key: str) -> Dropped | None:
        """Why a prompt is dropped; one that is not is remembered by the digest of `key`, its words."""
        if not row.turns:
            return Dropped.EMPTY
        digest = hashlib.sha256(key.encode()).digest()
        if digest in self._seen:
            return Dropped.DUPLICATE
        if any(turn in self._excluded for turn in row.turns):
            return Dropped.EXCLUDED
        self._seen.add(digest)
        return None


def read_set(part: PromptSet, skip_bad: bool, dropped: Counter[Dropped]) -> Iterator[Prompt]:
    """Yield what the rows of a set ask; malformed ones raise `DataError`, or with `skip_bad` are counted in `dropped`.

    Raises `ConfigError` when a library that it takes is not installed.
    """
    bad: list[str] = []
    for number, (where, row) in enumerate(read_rows(part, skip_bad, bad), start=1):
        try:
            turns, system = _map(part, row)
        except DataError as error:
            bad.append(f"{where}: {error}")
            if not skip_bad:
                raise DataError(f"{bad[0]}; mend the row or leave such rows out (skip_bad=true)") from None
        else:
            yield Prompt(f"{part.name}:{number}", part.name, turns, system)
    if bad:
        dropped[Dropped.MALFORMED] = len(bad)
        _log.warning("%s: left out %d malformed rows (first: %s)", part.name, len(bad), bad[0])


def _map(part: PromptSet, row: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """The user turns and the system message that a row holds. Raises `DataError` naming the field."""
    if part.prompt is not None:
        prompt = text(fill(part.prompt, row), "prompt")
        system = None if part.system is None else text(fill(part.system, row), "system")
        return (prompt,) if prompt else (), system or None
    named = {part.rename.get(name, name): value for name, value in row.items()}
    return asked(parse_conversation({form: named[form] for form in _FORMS if form in named}, part.name))


def _paths(settings: PrepareSettings, name: str) -> list[Path]:
    """The files of a set: for training, and the held-out prompts if there are to be any."""
    endings = ["jsonl", "held-out.jsonl"] if settings.held_out else ["jsonl"]
    return [settings.out / f"{name}.{ending}" for ending in endings]


def _open(stack: ExitStack, path: Path) -> BinaryIO:
    """A file that takes the name `path` when the stack is left without an error."""
    return stack.enter_context(stack.enter_context(atomic_path(path)).open("wb"))


def _earlier_files(out: Path) -> set[str]:
    """Names of the files that an earlier run reports. Raises `DataError` for a report of something else."""
    path = out / REPORT
    if not path.exists():
        return set()
    try:
        named = [Path(name) for part in json.loads(path.read_bytes())["sets"].values() for name in part["files"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: not the report of prompt files: choose another out") from None
    return {file.name for file in named}


def _write_report(settings: PrepareSettings, paths: dict[str, list[Path]], reports: dict[str, SetReport]) -> None:
    sets = {name: report.as_dict(paths[name]) for name, report in reports.items()}
    report = {"recipe": settings.digest(), "seed": settings.seed, "held_out": settings.held_out, "sets": sets}
    with atomic_path(settings.out / REPORT) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
