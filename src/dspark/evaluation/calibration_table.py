"""What `dspark calibrate` prints: the held-out figures before and after, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from dspark.evaluation.calibrate import CalibrationReport
from dspark.evaluation.confidence import ConfidenceReport


def show_calibration(report: CalibrationReport, as_json: bool = False) -> None:
    """Print the report on stdout."""
    if as_json:
        print_json(report)
        return
    console, calibration = Console(highlight=False), report.calibration
    console.print(position_table(report))
    console.print(threshold_table(report.before, report.after))
    console.print(
        f"Fitted on {calibration.num_rounds:,} rounds, judged on {report.before.num_rounds:,} of other prompts; "
        f"{report.num_end_rounds:,} rounds at the end of their answers were left out.\n"
        f"Perfect confidences would show up to {max(p.ece_noise for p in report.after.positions):.3f} by chance.\n"
        f"Written to {report.directory}: {', '.join(report.files)}."
    )


def print_json(report: CalibrationReport) -> None:
    """One object: the calibration, and the held-out figures before and after."""
    content = {
        "calibration": report.calibration.model_dump(mode="json"),
        "ece_max_before": report.before.ece_max,
        "ece_max_after_sts": report.after.ece_max,
        "num_end_rounds": report.num_end_rounds,
        "before": asdict(report.before),
        "after": asdict(report.after),
    }
    Console(highlight=False, soft_wrap=True).print_json(json.dumps(content))


def position_table(report: CalibrationReport) -> Table:
    """By position: temperature, and each figure before → after."""
    table = Table(title="Survival of the drafts up to each position, before → after", title_justify="left")
    for name in ("position", "temperature", "ECE", "Brier", "AUC", "mean confidence", "survival"):
        table.add_column(name, justify="right")
    pairs = zip(report.before.positions, report.after.positions, strict=True)
    for temperature, (before, after) in zip(report.calibration.temperatures, pairs, strict=True):
        table.add_row(
            str(before.position),
            f"{temperature:.3f}",
            f"{before.ece:.4f} → {after.ece:.4f}",
            f"{before.brier:.4f} → {after.brier:.4f}",
            f"{number(before.auc)} → {number(after.auc)}",
            f"{before.confidence:.3f} → {after.confidence:.3f}",
            f"{before.survival:.3f}",
        )
    return table


def threshold_table(before: ConfidenceReport, after: ConfidenceReport) -> Table:
    """What cutting each block before the first draft below a confidence would have given."""
    table = Table(title="Confidence threshold, before → after", title_justify="left")
    for name in ("threshold", "tokens per step", "drafts per step", "accepted / verified"):
        table.add_column(name, justify="right")
    for old, new in list(zip(before.thresholds, after.thresholds, strict=True))[::2]:
        table.add_row(
            f"{old.threshold:.1f}",
            f"{old.tokens_per_step:.3f} → {new.tokens_per_step:.3f}",
            f"{old.drafts_per_step:.3f} → {new.drafts_per_step:.3f}",
            f"{number(old.acceptance_rate)} → {number(new.acceptance_rate)}",
        )
    return table


def number(value: float | None) -> str:
    """Three digits, or a dash for what is not known."""
    return "–" if value is None else f"{value:.3f}"
