"""Files written whole or not at all, checksums, and JSON lines read with errors that name the line."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dspark.errors import ConfigError, DataError
from dspark.log import get_logger

_log = get_logger(__name__)


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; what the body writes there takes the name `path` when it succeeds.

    The body may create a file or a directory. If it raises, nothing is left behind and an older `path` stays as it
    was. Missing parent directories are created. The temporary name keeps the suffix, for writers that look at it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem}.tmp-{secrets.token_hex(4)}{target.suffix}")
    try:
        yield temporary
        if temporary.is_dir():
            replace_directory(temporary, target)
        else:
            _sync(temporary)
            temporary.replace(target)
    finally:
        _remove(temporary)


def lock(file: IO[Any], path: str | Path) -> None:
    """Keep other processes from writing `path` while `file`, an open file that stands for it, is not closed.

    The system frees the lock when the process ends, however it ends. Where the file system knows no locks nothing is
    kept out. Where another process has the lock, `file` is closed and `ConfigError` raised.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"out: {path} is written by another process: wait for it, or choose another out") from None
    except OSError as error:
        _log.debug("%s: not locked: %s", path, error)


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits. Raises `OSError`."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_jsonl(
    path: str | Path, skip_bad: bool = False, bad: list[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line of a JSON-lines file; empty lines are passed over.

    A file that cannot be read, and a line that is not one JSON object in UTF-8, raise `DataError` naming the file
    and the line. With `skip_bad` such lines are left out, and one warning at the end tells how many there were; a
    caller that gives `bad` gets "line N: problem" of each there instead of the warning.
    """
    warn = bad is None
    bad = [] if bad is None else bad
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = _parse_object(line)
                except (ValueError, RecursionError) as error:
                    bad.append(f"line {number}: {error}")
                    if not skip_bad:
                        raise DataError(f"{path}: {bad[0]}; mend the line or skip such lines (--skip-bad)") from None
                else:
                    yield number, row
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if bad and warn:
        _log.warning("%s: skipped %d bad lines (first: %s)", path, len(bad), bad[0])


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return `row` as one line of a JSON-lines file, line break included."""
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _parse_object(line: bytes) -> dict[str, Any]:
    row = json.loads(line.decode("utf-8-sig"))
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    return row


def _sync(path: Path) -> None:
    """Ask the system to put a file's bytes on the disk, so that a rename never exposes a partly written one."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def replace_directory(source: Path, target: Path) -> None:
    """Rename a directory over another, which the system cannot do in one step when the other is not empty."""
    if not target.exists():
        source.rename(target)
        return
    old = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    target.rename(old)
    source.rename(target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
