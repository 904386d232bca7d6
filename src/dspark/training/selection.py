"""Which checkpoint of a run is the best: the one whose drafts were accepted longest on held-out prompts."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.files import atomic_path


@dataclass
class Best:
    """The best measurement so far: its accepted length, its step, and how many came after it."""

    accepted_length: float = 0.0
    step: int = 0
    misses: int = 0

    def record(self, step: int, accepted_length: float) -> bool:
        """Take one measurement; whether it is the best."""
        if accepted_length > self.accepted_length:
            self.accepted_length, self.step, self.misses = accepted_length, step, 0
            return True
        self.misses += 1
        return False

    def exhausted(self, patience: int | None) -> bool:
        """Whether so many measurements in a row brought nothing better that the run should end."""
        return patience is not None and self.misses >= patience

    def as_dict(self) -> dict[str, Any]:
        """What `Best(**row)` restores."""
        return asdict(self)


def keep(source: Path, destination: Path) -> None:
    """Copy a servable checkpoint, replacing the one that is there only when the copy is whole."""
    with atomic_path(destination) as temporary:
        shutil.copytree(source, temporary)
