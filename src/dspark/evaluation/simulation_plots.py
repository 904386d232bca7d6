"""Pictures of a simulation: throughput against each user's speed, and drafts verified by load."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dspark.evaluation.drawing import COLORS, GRID, STYLE, WIDTH, Plot, finish
from dspark.evaluation.published import Published
from dspark.evaluation.simulate import POLICIES, Point, Policy, by_policy

NAMES = {"plain": "plain", "fixed": "all drafts", "early_stop": "early stop", "lagged": "lagged"}
COLOR_OF: dict[Policy, str] = dict(zip(POLICIES, COLORS, strict=False))


def simulation_plots(points: Sequence[Point], published: Published | None) -> list[Plot]:
    """The two pictures; `published` are the figures to draw beside them."""
    with mpl.rc_context(STYLE):
        return [speed(points, published), budget(points, published)]


def speed(points: Sequence[Point], published: Published | None) -> Plot:
    """Throughput against the speed of each user (paper figure 7), a line a policy, a dot a load."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.subplots()
    for policy, color in COLOR_OF.items():
        for is_open, line, marker in ((False, "-", "o"), (True, "--", "D")):
            here = [point for point in by_policy(points, policy) if (point.arrivals is not None) == is_open]
            if here:
                xs, ys = [p.user_tokens_per_second for p in here], [p.tokens_per_second for p in here]
                label = NAMES[policy] + (", random arrivals" if is_open else "")
                axes.plot(xs, ys, color=color, linestyle=line, marker=marker, markersize=4, label=label)
    if published is not None:
        columns: dict[Policy, Sequence[float]] = {"plain": published.plain, "fixed": published.fixed}
        for policy, rates in (columns | {"lagged": published.adaptive}).items():
            users = [rate / size for rate, size in zip(rates, published.concurrency, strict=True)]
            name = "adaptive" if policy == "lagged" else NAMES[policy]
            style = {"linestyle": ":", "marker": "x", "linewidth": 1.0, "label": f"published: {name}"}
            axes.plot(users, rates, color=COLOR_OF[policy], **style)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    _plain_numbers(axes.yaxis, LogLocator(subs=(1.0, 2.0, 5.0)))
    finish(axes, "tokens a second of each user", "tokens a second of all")
    axes.grid(axis="x", **GRID)
    axes.legend(fontsize=8)
    note = "Up and to the right is better. Each dot is a load; more requests at a time lie further left and higher."
    return Plot("Throughput against each user's speed", figure, note)


def budget(points: Sequence[Point], published: Published | None) -> Plot:
    """Drafts verified per request and round, by requests decoded together (paper figure 8)."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    for policy in POLICIES[1:]:
        here = sorted(by_policy(points, policy), key=lambda point: point.concurrency)
        xs, ys = [point.concurrency for point in here], [point.verify_budget for point in here]
        axes.plot(xs, ys, color=COLOR_OF[policy], marker="o", markersize=4, label=NAMES[policy])
    if published is not None:
        drafts = published.rows_at_low_load - 1
        label = f"published, another deployment, at low load: {published.rows_at_low_load:g} rows"
        axes.plot([min(published.concurrency)], [drafts], "x", color=COLORS[4], markersize=8, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(bottom=0)
    finish(axes, "requests decoded together", "drafts verified, per request and round")
    axes.legend(fontsize=8)
    return Plot("Verify budget by load", figure, "The row of the anchor is not counted.")


def _plain_numbers(axis: mpl.axis.Axis, places: LogLocator) -> None:
    axis.set_major_locator(places)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
