"""Training checkpoints: a directory per step, written whole or not at all, the newest found again on resume."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dspark.errors import CheckpointError
from dspark.files import atomic_path

KEEP = 2
STATE_FILE = "state.pt"


def save_state(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `directory/step-N/state.pt` atomically and drop all but the newest two."""
    path = directory / f"step-{step:08d}"
    with atomic_path(path) as temporary:
        temporary.mkdir()
        torch.save(state, temporary / STATE_FILE)
    for old in _steps(directory)[:-KEEP]:
        shutil.rmtree(old)
    return path


def load_latest(directory: Path) -> dict[str, Any] | None:
    """The newest state under `directory`, or None where there is none. Raises CheckpointError on a damaged one."""
    steps = _steps(directory)
    if not steps:
        return None
    path = steps[-1] / STATE_FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); delete {steps[-1]} to resume from the one before"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: is not a training state")
    return state


def _steps(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if re.fullmatch(r"step-\d{8}", p.name) and (p / STATE_FILE).is_file())
