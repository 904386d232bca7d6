"""Metric sums and where they go: the terminal, JSON lines and TensorBoard."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from dspark.errors import ConfigError
from dspark.files import atomic_path
from dspark.training.batch import TrainBatch
from dspark.training.config import TrainSettings
from dspark.training.live import RunLine
from dspark.training.parallel import Ranks


class MetricSums:
    """(numerator, denominator) sums by name over micro-batches and steps; a metric is their quotient."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.values: dict[str, float] = {}

    def add(self, metrics: dict[str, tuple[Tensor, Tensor]], loss: Tensor, weight: float, batch: TrainBatch) -> None:
        """Add one micro-batch; `loss` is its share of a step whose weights sum to `weight`."""
        for name, (numerator, denominator) in metrics.items():
            self.increase(name, float(numerator), float(denominator))
        self.increase("loss", float(loss.detach()) / weight, 0.0)
        self.increase("tokens", float(batch.segment_ids.ge(0).sum()), 0.0)

    def increase(self, name: str, numerator: float, denominator: float) -> None:
        """Add to one pair."""
        n, d = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (n + numerator, d + denominator)

    def add_time(self, seconds: float, waited: float) -> None:
        """Record one step's duration and how much of it went into waiting for data."""
        self.increase("seconds", seconds, 0.0)
        self.increase("data_wait_share", waited, seconds)
        self.increase("loss", 0.0, 1.0)

    def set(self, **values: float) -> None:
        """Values that are not averaged: the last one counts."""
        self.values.update(values)

    def merge(self, other: MetricSums) -> None:
        """Add another step's sums."""
        for name, (n, d) in other.sums.items():
            self.increase(name, n, d)
        self.values.update(other.values)

    def reduce(self, ranks: Ranks) -> None:
        """Add what the other processes counted; time is the main one's."""
        for other in ranks.gather(self.sums)[1:]:
            for name, (n, d) in other.items():
                if name not in ("seconds", "data_wait_share"):
                    self.increase(name, n, 0.0 if name == "loss" else d)

    def results(self) -> dict[str, float]:
        """Every metric's quotient; totals (tokens) become rates per second."""
        seconds = self.sums.get("seconds", (math.nan, 0.0))[0]
        result = {name: n / d for name, (n, d) in self.sums.items() if d}
        result["tokens_per_second"] = self.sums.get("tokens", (0.0, 0.0))[0] / seconds
        result["step_seconds"] = seconds / self.sums["loss"][1] if self.sums.get("loss", (0, 0))[1] else math.nan
        return result | self.values


class MetricLog:
    """Shows averaged metrics on stderr; appends them to `metrics.jsonl` and TensorBoard under `settings.out`, and to
    Weights & Biases. The run has `total` steps and stands at `step`.

    Raises ConfigError when `wandb_project` is set and wandb is not installed.
    """

    def __init__(self, settings: TrainSettings, step: int, total: int) -> None:
        output = settings.out
        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "metrics.jsonl"
        _drop_from(self.path, step)
        self.board = SummaryWriter(str(output / "tensorboard"), purge_step=step)
        self.tracker = None if settings.wandb_project is None else _wandb(settings)
        self.line = RunLine(total, step)
        self.latest: dict[str, float] = {}

    def add(self, step: int, sums: MetricSums) -> None:
        """Write the averages over the steps up to `step` that `sums` holds."""
        results = sums.results()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | results) + "\n")
        for name, value in results.items():
            self.board.add_scalar(name, value, step)
        if self.tracker is not None:
            self.tracker.log(results, step=step)
        self.latest = results
        self.line.report(results)

    def __enter__(self) -> Self:
        self.line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.line.__exit__(kind, error, trace)
        self.board.close()
        if self.tracker is not None:
            self.tracker.finish()


def _wandb(settings: TrainSettings) -> Any:
    """A Weights & Biases run under the output's own name, which a resumed run continues."""
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError(
            "wandb_project is set, but wandb is not installed: pip install wandb, or leave the setting out"
        ) from None
    name = settings.out.resolve().name
    return wandb.init(
        project=settings.wandb_project, name=name, id=f"{name}-{settings.identity()}", resume="allow", dir=settings.out
    )


def _drop_from(path: Path, step: int) -> None:
    """Cut lines written after the state that is being resumed, so that no step is logged twice."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    with atomic_path(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return math.inf
