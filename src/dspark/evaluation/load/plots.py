"""Pictures of loads: throughput against user speed with its Pareto front, and latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark.evaluation.drawing import COLORS, GRID, INK, STYLE, WIDTH, Plot, finish
from dspark.evaluation.load.figures import LoadFigures, Spread, pareto

_MARKERS = "osD^vPX*"


def load_plots(points: Sequence[LoadFigures]) -> list[Plot]:
    """The front, then the latencies."""
    with mpl.rc_context(STYLE):
        return [front(points), latencies(points)]


def front(points: Sequence[LoadFigures]) -> Plot:
    """Throughput against the median speed of each user, a line a mode, a dot a load; the front is underlaid."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.subplots()
    best = pareto(points)
    xs, ys = [p.user_tokens_per_second.p50 for p in best], [p.tokens_per_second for p in best]
    axes.plot(xs, ys, color="#808080", alpha=0.35, linewidth=7, solid_capstyle="round", label="Pareto front", zorder=1)
    for name, here, color, marker in _series(points):
        known = [point for point in here if point.user_tokens_per_second.p50 is not None]
        xs, ys = [p.user_tokens_per_second.p50 for p in known], [p.tokens_per_second for p in known]
        axes.plot(xs, ys, color=color, marker=marker, markersize=4, label=name)
        for point in known:
            place = (point.user_tokens_per_second.p50, point.tokens_per_second)
            axes.annotate(point.load, place, (4, 4), textcoords="offset points", fontsize=7, color=INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    finish(axes, "tokens a second of each user, median", "tokens a second of all")
    axes.grid(axis="x", **GRID)
    axes.legend(fontsize=8)
    note = (
        "Up and to the right is better. At each dot: requests at a time, or arrivals a second. On the grey band lie "
        "the loads that no other beats in both."
    )
    return Plot("Throughput against each user's speed", figure, note)


def latencies(points: Sequence[LoadFigures]) -> Plot:
    """Time to the first token and between pieces, by load: median, and up to the 90th percentile."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _latency(left, points, lambda point: point.first_token, "to the first token, ms")
    _latency(right, points, lambda point: point.between_pieces, "between pieces of text, ms")
    left.legend(fontsize=8)
    return Plot("Latencies", figure, "Medians; the whiskers reach to the 90th percentile.")


def _latency(axes: Axes, points: Sequence[LoadFigures], pick: Callable[[LoadFigures], Spread], label: str) -> None:
    names = list(dict.fromkeys(point.load for point in points))
    series = _series(points)
    for number, (name, here, color, marker) in enumerate(series):
        known = [(names.index(point.load), pick(point)) for point in here if pick(point).p50 is not None]
        xs = [place + 0.08 * (number - (len(series) - 1) / 2) for place, _ in known]
        medians = [1000 * (spread.p50 or 0.0) for _, spread in known]
        above = [1000 * (spread.p90 or 0.0) - median for (_, spread), median in zip(known, medians, strict=True)]
        bars = [[0.0] * len(above), above]
        axes.errorbar(xs, medians, bars, color=color, marker=marker, markersize=4, capsize=2, label=name)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(bottom=0)
    finish(axes, "requests at a time, or arrivals a second", label)


def _series(points: Sequence[LoadFigures]) -> list[tuple[str, list[LoadFigures], str, str]]:
    """Name, points, colour and marker of each; closed and open loads stand apart."""
    found: dict[tuple[str, bool], list[LoadFigures]] = {}
    for point in points:
        found.setdefault((point.series, point.arrivals is not None), []).append(point)
    colors = dict(zip(dict.fromkeys(point.series for point in points), COLORS * len(points), strict=False))
    drawn = []
    for i, ((name, is_open), here) in enumerate(found.items()):
        ordered = sorted(here, key=lambda p: p.arrivals or p.concurrency or 0)
        drawn.append((name + (", arrivals" if is_open else ""), ordered, colors[name], _MARKERS[i % len(_MARKERS)]))
    return drawn
