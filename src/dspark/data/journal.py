"""Rows appended to a JSON-lines file by a run that may be killed and started again."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from dspark.errors import ConfigError, DataError
from dspark.files import atomic_path, json_line, lock, read_jsonl


class Journal:
    """The rows of `path`, each with an "id" of its own; a line that was cut off by a kill is removed on opening.

    `stamp` names what decides the rows' content. It is kept beside the file, and a file begun with other values of the
    same keys is refused, and so is one that another process writes. Use as a context manager. Raises `ConfigError`, and
    `DataError` for a file of something else.
    """

    def __init__(self, path: str | Path, stamp: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._claim(json.loads(json.dumps(stamp)))
        self._file: BinaryIO = self.path.open("ab")
        lock(self._file, self.path)
        _cut_torn_line(self.path)
        try:
            self.rows = [row for _, row in read_jsonl(self.path)]
        except DataError:
            self._file.close()
            raise
        self.ids = {row["id"] for row in self.rows}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; once this returns, a kill of the process does not lose it."""
        assert row["id"] not in self.ids
        self._file.write(json_line(row))
        self._file.flush()
        self.ids.add(row["id"])

    def _claim(self, stamp: dict[str, Any]) -> None:
        """Compare the stamp with the one the file was begun with, and keep both."""
        file = self.path.with_suffix(".settings.json")
        begun: dict[str, Any] = {}
        if file.exists():
            begun = json.loads(file.read_bytes())
            changed = [key for key in begun if key in stamp and begun[key] != stamp[key]]
            if changed:
                raise ConfigError(
                    f"{', '.join(changed)}: {self.path} was begun with other values: choose another out, or remove "
                    f"it and {file.name}"
                )
        elif self.path.exists():
            raise DataError(f"{self.path}: is there, and no earlier run wrote it: choose another out")
        with atomic_path(file) as temporary:
            temporary.write_text(json.dumps(begun | stamp, indent=2) + "\n", encoding="utf-8")


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line break."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
