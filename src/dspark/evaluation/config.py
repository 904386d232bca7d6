"""Settings of evaluation and calibration. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from dspark.config import Settings
from dspark.engine.config import ModelOptions


class CalibrateOptions(Settings):
    """Measure a drafter's confidence at full width, fit its temperatures, and judge them on other prompts.

    Example: dspark calibrate prompts.jsonl --out calibrated
    """

    prompts: Annotated[tuple[Path, ...], tyro.conf.Positional] = Field(min_length=1)
    """JSON-lines files of prompts, like those that will be served; the first user turn of each is answered."""
    held_out: tuple[Path, ...] = ()
    """Prompt files to judge on alone; without them a share of the prompts is kept for that."""
    held_out_share: float = Field(0.5, gt=0, lt=1)
    """Share of the prompts to judge on, drawn by prompt, where there are no held-out files."""
    out: Path | None = None
    """Directory of the files; by default the drafter's own. A run that was cut off continues there."""
    limit: int | None = Field(None, ge=1)
    """Prompts of each file, drawn by `seed`; by default all."""
    temperatures: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = Field((1.0,), min_length=1)
    """Sampling temperatures; every prompt is answered once at each."""
    max_tokens: int = Field(128, ge=1)
    """New tokens of an answer at most."""
    seed: int = 0
    """Decides which prompts are taken and which are held out, and the random numbers of each answer."""
    max_batch: int = Field(16, ge=1)
    """Requests decoded together."""
    max_length: int = Field(2048, ge=2)
    """Tokens of prompt and answer together; longer prompts are left out."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the figures as one JSON object instead of a table."""
    model: ModelOptions = ModelOptions()
