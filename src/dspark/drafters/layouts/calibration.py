"""Calibration files: the temperatures that make a drafter's confidences mean what they say.

Ours lies beside the drafter's weights; SGLang reads the other (`--speculative-dspark-confidence-sts-path`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from dspark.config import Settings
from dspark.drafters.base import Drafter
from dspark.errors import CheckpointError, ConfigError
from dspark.files import atomic_path
from dspark.models.weights import read_json

CALIBRATION_NAME = "calibration.json"
SGLANG_NAME = "calibration.sglang.json"

Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Calibration(Settings):
    """Temperatures of sequential temperature scaling, and what they were fitted on.

    Apply as sigmoid(confidence logit k / temperatures[k]): see `dspark.spec.calibration.survival`. Fewer drafts a round
    than the drafter has take the first of them.
    """

    drafter_digest: str
    target: str
    target_digest: str
    temperatures: tuple[Temperature, ...] = Field(min_length=1)  # one a draft position
    sampling_temperatures: tuple[float, ...]  # of the answers whose rounds were fitted
    prompts: tuple[str, ...]  # names of the prompt files
    num_rounds: int = Field(ge=1)  # that were fitted, all of full width
    num_held_out_rounds: int = Field(ge=0)  # of other prompts, on which the errors were measured
    ece_before: tuple[float, ...]  # of the survival at each position, 15 bins, on the held-out rounds
    ece_after: tuple[float, ...]

    @model_validator(mode="after")
    def _one_error_a_position(self) -> Self:
        for name in ("ece_before", "ece_after"):
            if len(getattr(self, name)) != len(self.temperatures):
                raise ValueError(f"{name} must have one value for each of the {len(self.temperatures)} temperatures")
        return self

    @classmethod
    def read(cls, path: str | Path, drafter: Drafter) -> Self:
        """Read our file for a prepared drafter. Raises CheckpointError: missing, damaged, or of another drafter."""
        assert drafter.digest is not None, "call prepare() before reading its calibration"
        calibration = cls.read_any(path)
        if calibration.drafter_digest != drafter.digest:
            raise CheckpointError(
                f"{path}: drafter_digest: was fitted for drafter {calibration.drafter_digest}, not for this one "
                f"({drafter.digest}): run dspark calibrate for it"
            )
        if len(calibration.temperatures) != drafter.num_drafts:
            raise CheckpointError(
                f"{path}: temperatures: has {len(calibration.temperatures)}, but the drafter drafts "
                f"{drafter.num_drafts} tokens: run dspark calibrate again"
            )
        return calibration

    @classmethod
    def read_any(cls, path: str | Path) -> Self:
        """Read our file, whichever drafter it is of. Raises CheckpointError: missing or damaged."""
        if not Path(path).is_file():
            raise CheckpointError(f"{path}: no such calibration: make it with dspark calibrate")
        try:
            return cls.from_dict(read_json(Path(path)), str(path))
        except ConfigError as error:
            raise CheckpointError(f"{error}; run dspark calibrate again") from None

    def write(self, directory: str | Path) -> None:
        """Write our file and SGLang's into a directory, each atomically."""
        for name, content in ((CALIBRATION_NAME, self.model_dump(mode="json")), (SGLANG_NAME, self.for_sglang())):
            with atomic_path(Path(directory) / name) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def for_sglang(self) -> dict[str, Any]:
        """The object that SGLang reads: exactly its five fields."""
        return {
            "temperatures": list(self.temperatures),
            "dataset": ",".join(self.prompts),
            "num_samples": self.num_rounds,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
        }
