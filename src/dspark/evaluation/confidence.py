"""How far a drafter's confidence can be trusted, from the records of rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.engine.request import RoundRecord
from dspark.errors import DataError
from dspark.spec.calibration import (
    auc,
    brier,
    conditional,
    expected_error,
    noise_error,
    reliability,
    survival,
    survived,
)

THRESHOLDS = tuple(i / 20 for i in range(20))


@dataclass(frozen=True)
class ReliabilityBin:
    """Rounds whose predicted survival lies in [lower, upper); the means are None where there are none."""

    lower: float
    upper: float
    count: int
    confidence: float | None  # mean predicted survival
    survival: float | None  # share of rounds whose prefix survived


@dataclass(frozen=True)
class PositionConfidence:
    """Predicted against measured survival of the drafts 1..position."""

    position: int  # from 1
    ece: float  # expected calibration error, 15 bins
    ece_noise: float  # what perfect confidences would show on so few rounds, by chance
    brier: float
    auc: float | None  # None where the prefix survived always or never
    confidence: float  # mean predicted survival
    survival: float  # share of rounds whose prefix survived
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True)
class ThresholdPoint:
    """What verifying only up to the first draft whose confidence is below `threshold` would have given.

    `threshold` applies to P(accepted | all before it accepted). The bonus token of each step is counted as a token.
    """

    threshold: float
    tokens_per_step: float
    drafts_per_step: float  # drafts that would have been verified
    acceptance_rate: float | None  # accepted drafts of those; None where none would have been verified


@dataclass(frozen=True)
class ConfidenceReport:
    """Confidence figures of a set of rounds; `dataclasses.asdict` makes plain JSON of it.

    `num_rounds` full-width rounds were used. `num_censored` others, which did not verify every draft, were left out:
    where a planner trimmed them by their confidence, the rest is no fair sample and these figures mislead.
    """

    num_rounds: int
    num_censored: int
    temperatures: tuple[float, ...] | None  # of the calibration applied; None: the head's own confidences
    positions: tuple[PositionConfidence, ...]
    thresholds: tuple[ThresholdPoint, ...]

    @property
    def ece_max(self) -> float:
        """The calibration error of the worst position."""
        return max(position.ece for position in self.positions)


def confidence_report(
    records: Iterable[RoundRecord], temperatures: Sequence[float] | None = None
) -> ConfidenceReport | None:
    """Calibration by position and a threshold sweep (DSpark paper figures 5 and 6), from rounds of one drafter.

    records: `Completion.round_records` of an engine with `record_rounds`, of as many answers as there are.
    temperatures: a calibration to apply, one a position; None judges the head's own confidences.
    Returns None where there is nothing to judge: no confidence head, or no full-width round.
    Fields: report.num_rounds, .num_censored, .temperatures, .ece_max;
    report.positions[k]: .position, .ece, .ece_noise, .brier, .auc, .confidence, .survival, .bins
    (bins[i]: .lower, .upper, .count, .confidence, .survival);
    report.thresholds[i]: .threshold, .tokens_per_step, .drafts_per_step, .acceptance_rate.
    Raises DataError when the rounds have different numbers of drafts.
    """
    judged = [record for record in records if record.num_drafts and record.confidence_logits]
    whole = [record for record in judged if record.is_full_width]
    if not whole:
        return None
    logits, correct_len = as_tensors(whole)
    return ConfidenceReport(
        num_rounds=len(whole),
        num_censored=len(judged) - len(whole),
        temperatures=None if temperatures is None else tuple(temperatures),
        positions=by_position(logits, correct_len, temperatures),
        thresholds=sweep(logits, correct_len, temperatures),
    )


def as_tensors(records: Sequence[RoundRecord]) -> tuple[Tensor, Tensor]:
    """Confidence logits [N, G] and drafts accepted [N] of N rounds."""
    if len(widths := {len(record.confidence_logits) for record in records}) > 1:
        raise DataError(f"rounds of {sorted(widths)} drafts are mixed: judge those of one drafter and width at a time")
    logits = torch.tensor([record.confidence_logits for record in records], dtype=torch.float64)
    return logits, torch.tensor([record.correct_len for record in records])


def by_position(
    logits: Tensor, correct_len: Tensor, temperatures: Sequence[float] | None
) -> tuple[PositionConfidence, ...]:
    """Judge the survival at each position: logits [N, G], correct_len [N]."""
    predicted, outcome = survival(logits, temperatures), survived(correct_len, logits.shape[1])
    figures = []
    for k in range(logits.shape[1]):
        confidence, happened = predicted[:, k].contiguous(), outcome[:, k]
        bins = reliability(confidence, happened)
        width = 1 / len(bins.counts)
        figures.append(
            PositionConfidence(
                position=k + 1,
                ece=float(expected_error(bins)),
                ece_noise=float(noise_error(bins)),
                brier=brier(confidence, happened),
                auc=auc(confidence, happened),
                confidence=float(confidence.mean()),
                survival=float(happened.double().mean()),
                bins=tuple(
                    ReliabilityBin(i * width, (i + 1) * width, int(n), c if n else None, s if n else None)
                    for i, (n, c, s) in enumerate(zip(*(part.tolist() for part in bins), strict=True))
                ),
            )
        )
    return tuple(figures)


def sweep(logits: Tensor, correct_len: Tensor, temperatures: Sequence[float] | None) -> tuple[ThresholdPoint, ...]:
    """Replay full-width rounds with blocks cut before the first draft below each threshold."""
    confidence = conditional(logits, temperatures)
    points = []
    for threshold in THRESHOLDS:
        kept = (confidence >= threshold).long().cumprod(1).sum(1)
        accepted = float(torch.minimum(kept, correct_len).double().mean())
        drafts = float(kept.double().mean())
        points.append(ThresholdPoint(threshold, accepted + 1, drafts, accepted / drafts if drafts else None))
    return tuple(points)
