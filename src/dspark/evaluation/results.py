"""The directory of a run: rows, the settings that decided them, and what is told about the pair of models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import DataError
from dspark.evaluation.rows import Row, Setting
from dspark.files import atomic_path, read_jsonl

ROWS, STAMP, ABOUT = "rows.jsonl", "rows.settings.json", "run.json"
Pair = tuple[str, Setting]


@dataclass(frozen=True)
class Run:
    """One drafter, measured. `stamp` decided the rows, `about` is told in reports."""

    name: str
    rows: Sequence[Row]
    stamp: dict[str, Any]
    about: dict[str, Any]

    def drafted(self) -> dict[Pair, Row]:
        """The rows with speculation, by what they are paired by."""
        return {row.pair: row for row in self.rows if row.drafted and row.error is None}

    def plain(self) -> dict[Pair, Row]:
        """The rows of plain decoding."""
        return {row.pair: row for row in self.rows if not row.drafted and row.error is None}

    @property
    def left_out(self) -> dict[str, str]:
        """Prompts that could not be answered, and why."""
        return {row.prompt: row.error for row in self.rows if row.error is not None}


def is_run(path: Path) -> bool:
    """Whether a directory holds results."""
    return (path / ROWS).is_file()


def read_run(path: Path, name: str) -> Run:
    """Read a run, whole or cut off. Raises `DataError` naming the file at fault."""
    rows = [Row.from_dict(row, f"{path / ROWS}: line {number}") for number, row in read_jsonl(path / ROWS)]
    return Run(name, rows, _read(path / STAMP), _read(path / ABOUT))


def write_about(path: Path, about: dict[str, Any]) -> None:
    """Note what a run is of, for those who read its rows later."""
    with atomic_path(path / ABOUT) as temporary:
        temporary.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}): name a directory that `dspark eval` wrote") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: not an object: name a directory that `dspark eval` wrote")
    return found


def short_names(paths: Sequence[Path]) -> list[str]:
    """A name for each path, as short as tells them apart: its last part, or as many parts from the end as it takes."""
    resolved = [path.resolve() for path in paths]
    for length in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-length:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise DataError(f"{paths[0]}: comes twice: name each run once")
