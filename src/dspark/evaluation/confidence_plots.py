"""The plots of a drafter's confidence: reliability by position, and what a threshold on it would give."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from dspark.evaluation.drawing import GRID, INK, WIDTH, Plot, Series, finish, legend

PANELS = 4  # a row


def reliability(series: Sequence[Series]) -> Plot:
    """Measured against predicted survival, a panel for each position; the diagonal is honesty."""
    reports = [(one, one.figures.confidence) for one in series if one.figures.confidence is not None]
    width = max(len(report.positions) for _, report in reports)
    rows = -(-width // PANELS)
    figure = Figure(figsize=(WIDTH, 2.6 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, PANELS, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, position in zip(panels, range(width), strict=False):
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=":")
        for one, report in reports:
            if position < len(report.positions):
                bins = [part for part in report.positions[position].bins if part.count]
                predicted, measured = [part.confidence for part in bins], [part.survival for part in bins]
                most = max(part.count for part in bins)
                axes.plot(predicted, measured, color=one.color, linestyle=one.line, linewidth=1.0)
                axes.scatter(predicted, measured, [4 + 36 * part.count / most for part in bins], color=one.color)
        axes.set_title(f"draft {position + 1}")
        axes.grid(**GRID)
        axes.set_axisbelow(True)
    for axes in panels[width:]:
        axes.set_visible(False)
    figure.supxlabel("predicted survival", fontsize="medium")
    figure.supylabel("measured", fontsize="medium")
    legend(figure, series)
    return Plot("Confidence: reliability by position", figure, "All tasks. The larger a dot, the more rounds; 15 bins.")


def thresholds(series: Sequence[Series]) -> Plot:
    """Tokens a step and acceptance rate if blocks were cut before the first draft of less confidence."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for one in series:
        points = () if one.figures.confidence is None else one.figures.confidence.thresholds
        places = [point.threshold for point in points]
        left.plot(places, [point.tokens_per_step for point in points], color=one.color, linestyle=one.line)
        known = [point for point in points if point.acceptance_rate is not None]
        rates = [point.acceptance_rate for point in known]
        right.plot([point.threshold for point in known], rates, color=one.color, linestyle=one.line)
    finish(left, "threshold", "tokens a step")
    finish(right, "threshold", "accepted of the verified")
    legend(figure, series)
    note = "All tasks, replayed from rounds that verified every draft: a block is cut before the first draft below it."
    return Plot("Confidence: a threshold swept", figure, note)
