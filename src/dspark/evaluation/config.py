"""Options of `dspark eval`, `dspark compare`, `dspark calibrate` and `dspark simulate`. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import tyro
from pydantic import Field, model_validator

from dspark.config import Settings
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.evaluation.homes import TASK_NAMES


class MeasureOptions(Settings):
    """What is asked of a pair of models, and how it answers."""

    tasks: tuple[str, ...] = Field(TASK_NAMES, min_length=1)
    """Built-in names, JSON-lines files of prompts or conversations, or CATEGORY=FILE for a file of that category."""
    data: Path | None = None
    """Directory of NAME.jsonl for the built-in tasks; by default they are fetched from their public homes once."""
    prompts: int = Field(40, ge=1)
    """Prompts of each task: its first ones."""
    tokens: int = Field(128, ge=2)
    """New tokens of each answer at most."""
    temperatures: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = Field((0.0, 1.0), min_length=1)
    """Every prompt is answered once at each; 0 is greedy."""
    thinking: Literal["default", "on", "off", "both"] = "default"
    """The chat template's enable_thinking: left alone, set, or measured both ways."""
    plain: bool = True
    """Decode every prompt plainly as well, in turn with speculation, to measure the speed-up."""
    batch: int = Field(8, ge=1)
    """Requests decoded together."""
    max_length: int = Field(4096, ge=2)
    """Tokens of prompt and answer together; longer ones are left out and counted."""
    seed: int = 0
    """With a prompt's words it decides the random numbers of its answer, whatever the batch or the process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run; "auto" takes CUDA where there is one."""

    @model_validator(mode="after")
    def _values_are_unique(self) -> Self:
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError("temperatures: one is named twice")
        return self

    def engine_settings(self) -> EngineSettings:
        """The engine that measures."""
        return EngineSettings(max_batch=self.batch, max_length=self.max_length, record_rounds=True)


class ReportOptions(Settings):
    """How a report is given."""

    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the report as one JSON object instead of tables."""


class EvalOptions(Settings):
    """Measure a drafter over task sets: accepted length, acceptance by position, speed-up; resumes. Under torchrun,
    on many processes.

    Example: dspark eval --drafter runs/first/last --tasks gsm8k mt-bench --prompts 40 --out results/first
    """

    out: Path
    """Directory of rows.jsonl, report.json and report.html; a run that was cut off goes on there."""
    measure: MeasureOptions = MeasureOptions()
    model: ModelOptions = ModelOptions()
    report: ReportOptions = ReportOptions()


class CompareOptions(Settings):
    """Put drafters side by side, paired by prompt, with the significance of their differences.

    Example: dspark compare results/first results/second --out results/compared
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Results of `dspark eval`, or drafters, which are measured first with the options below. The others are compared
    with the first."""
    out: Path
    """Directory of compare.json and compare.html, and of the results of drafters that had to be measured."""
    measure: MeasureOptions = MeasureOptions()
    model: ModelOptions = ModelOptions()
    report: ReportOptions = ReportOptions()


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


class SimulateOptions(Settings):
    """Run the planner against costs of rounds and a model of acceptance, over loads; no model is run.

    Example: dspark simulate --arrivals 2 8 32 --out simulation
    """

    costs: Path | None = None
    """A file of `dspark profile`, or an SPS table of SGLang; by default what the published throughputs imply."""
    acceptance: Path | None = None
    """Recorded rounds: rows.jsonl of `dspark eval` or calibration.rounds.jsonl; by default the published accepted
    lengths."""
    calibration: Path | None = None
    """calibration.json of the drafter of recorded rounds, for the temperatures of its confidences."""
    chances: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    """Instead of recorded rounds: the chance of each draft, given that all before it were accepted."""
    concentration: float = Field(1.0, gt=0)
    """How much alike the chances of single drafts are: of a beta distribution round each of `chances`."""
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of requests decoded at any time; by default those that the costs were measured at."""
    arrivals: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Requests that arrive a second, at random, served up to max_batch at a time."""
    max_batch: int = Field(256, ge=1)
    """Requests decoded together at most, where they arrive at random."""
    length: float = Field(256.0, gt=0)
    """Tokens of an answer, on average; the lengths are exponential."""
    requests: int = Field(200, ge=10)
    """Requests served under each policy and load, at least; as many more as are needed for the load to settle."""
    seed: int = 0
    """Decides the random numbers."""
    out: Path = Path("simulation")
    """Directory for simulation.json, simulation.html and the plots speed.png and budget.png."""
    report: ReportOptions = ReportOptions()

    @model_validator(mode="after")
    def _one_model_of_acceptance(self) -> Self:
        if self.acceptance is not None and self.chances:
            raise ValueError("chances: drafts are accepted as recorded (acceptance) or as given: leave one out")
        if self.calibration is not None and self.acceptance is None:
            raise ValueError("calibration: belongs to recorded rounds: name them with acceptance")
        return self
