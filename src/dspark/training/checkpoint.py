"""Training checkpoints: a directory per step, written whole or not at all, the newest found again on resume.

The tensors are a `torch.distributed.checkpoint`, so that a run goes on with any number of processes; they are copied
and then written in the background. `run.json` says whose they are.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from dspark.errors import CheckpointError
from dspark.files import replace_directory
from dspark.training.parallel import Ranks

KEEP = 2
RUN_FILE = "run.json"


class StateWriter:
    """Writes states under `directory` in the background, one at a time, and keeps the newest two."""

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self.directory, self.ranks = directory, ranks
        self._group = ranks.new_group()  # of its own: the trainer's collectives go on meanwhile
        self._pending: tuple[Future[Any], int, dict[str, Any]] | None = None

    def save(self, step: int, tensors: dict[str, Any], run: dict[str, Any]) -> None:
        """Copy `tensors` (nested, equal keys on every process) and start to write them; `run` goes into run.json."""
        self.finish()
        temporary = self._temporary(step)
        if self.ranks.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.ranks.wait()
        writing = async_save(tensors, checkpoint_id=temporary, process_group=self._group)
        assert isinstance(writing, Future)
        self._pending = writing, step, run

    def poll(self) -> None:
        """Give the state under way its name if it is on disk. Raises CheckpointError when it cannot be written."""
        if self._pending is not None and self._pending[0].done():
            self._publish()

    def finish(self) -> None:
        """Wait until the state under way is on disk. Raises CheckpointError when it cannot be written."""
        if self._pending is not None:
            self._publish()
        self.ranks.wait()

    def _temporary(self, step: int) -> Path:
        return self.directory / f".step-{step:08d}.writing"

    def _publish(self) -> None:
        """On the main process, whose part is done when every process's is: name the directory, drop old ones."""
        assert self._pending is not None
        (writing, step, run), self._pending = self._pending, None
        try:
            writing.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.directory}: the state of step {step} cannot be written: {error}") from None
        if not self.ranks.is_main:
            return
        temporary, path = self._temporary(step), self.directory / f"step-{step:08d}"
        (temporary / RUN_FILE).write_text(json.dumps(run), encoding="utf-8")
        replace_directory(temporary, path)
        for old in _steps(self.directory)[:-KEEP]:
            shutil.rmtree(old)


def latest_state(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest state's directory and what its run.json says; None where there is none. Raises CheckpointError."""
    steps = _steps(directory)
    if not steps:
        return None
    path = steps[-1] / RUN_FILE
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None
    return steps[-1], run


def load_tensors(path: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Fill `tensors` in place from the state at `path`. Raises CheckpointError on a damaged one."""
    try:
        load(tensors, checkpoint_id=path, process_group=ranks.group)
    except (
        CheckpointException,
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        pickle.UnpicklingError,
    ) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return CheckpointError(
        f"{path}: cannot be read ({reason}); delete that step's directory to resume from the one before"
    )


def _steps(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if re.fullmatch(r"step-\d{8}", p.name) and (p / RUN_FILE).is_file())
