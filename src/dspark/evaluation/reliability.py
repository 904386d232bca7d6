"""Pictures of a drafter's confidence: reliability diagrams by position and the threshold sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark.evaluation.confidence import ConfidenceReport, PositionConfidence, ThresholdPoint
from dspark.evaluation.drawing import COLORS, GRID
from dspark.files import atomic_path

MAX_COLUMNS = 4
MARKER_AREA = 300.0  # points squared, of a bin that holds every round


def draw_confidence(reports: Mapping[str, ConfidenceReport], path: str | Path) -> None:
    """Write the figure in the format of the path's suffix (.png, .svg), atomically."""
    figure = confidence_figure(reports)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)


def confidence_figure(reports: Mapping[str, ConfidenceReport]) -> Figure:
    """Reports of one drafter by name (such as before and after): a panel a position, then the sweep's two curves."""
    assert 0 < len(reports) <= len(COLORS)
    positions = list(zip(*(report.positions for report in reports.values()), strict=True))
    num_panels = len(positions) + 2
    columns = min(MAX_COLUMNS, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(3.2 * columns, 3.2 * rows + 0.4), layout="constrained")
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(num_panels)]
    for panel, same in zip(panels, positions, strict=False):
        _reliability_panel(panel, dict(zip(reports, same, strict=True)))
    _sweep_panel(panels[-2], reports, lambda point: point.tokens_per_step, "tokens per step, the bonus counted")
    _sweep_panel(panels[-1], reports, lambda point: point.acceptance_rate, "accepted share of verified drafts")
    figure.legend(*panels[-2].get_legend_handles_labels(), loc="outside upper left", ncols=len(reports))
    return figure


def _reliability_panel(panel: Axes, figures: Mapping[str, PositionConfidence]) -> None:
    """Predicted against measured survival; a marker's area is the share of rounds in its bin."""
    panel.plot([0, 1], [0, 1], color="#808080", linestyle="--", linewidth=1)
    for color, position in zip(COLORS, figures.values(), strict=False):
        points = [(b.confidence or 0.0, b.survival or 0.0, b.count) for b in position.bins if b.count]
        total = sum(count for _, _, count in points)
        x, y = [p[0] for p in points], [p[1] for p in points]
        panel.plot(x, y, color=color, linewidth=1.2)
        panel.scatter(x, y, s=[MARKER_AREA * p[2] / total for p in points], color=color, alpha=0.6)
    errors = " / ".join(f"{position.ece:.3f}" for position in figures.values())
    title = f"position {next(iter(figures.values())).position}"
    panel.set_title(title if len(figures) > 2 else f"{title}, ECE {errors}", fontsize=9)
    panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted survival", ylabel="measured survival")
    panel.set_aspect("equal")


def _sweep_panel(
    panel: Axes, reports: Mapping[str, ConfidenceReport], pick: Callable[[ThresholdPoint], float | None], title: str
) -> None:
    """One figure of the threshold sweep against the threshold (DSpark paper figure 5)."""
    for color, (name, report) in zip(COLORS, reports.items(), strict=False):
        known = [(p.threshold, value) for p in report.thresholds if (value := pick(p)) is not None]
        panel.plot([x for x, _ in known], [y for _, y in known], color=color, marker="o", markersize=3, label=name)
    panel.set_title(title, fontsize=9)
    panel.set(xlim=(0, 1), xlabel="confidence threshold")
    panel.grid(**GRID)
