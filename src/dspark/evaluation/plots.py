"""The plots of a report. Text and axes take the page's colour, so that they read on light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark.evaluation.compare import Comparison, Difference
from dspark.evaluation.rows import Setting
from dspark.evaluation.stats import Estimate, Figures
from dspark.evaluation.summary import SettingFigures
from dspark.evaluation.tables import Measured

INK = "#010203"  # becomes currentColor
GRID = {"color": "#808080", "alpha": 0.25, "linewidth": 0.6}
COLORS = ("#3d85d8", "#e07b28", "#2a9d6f", "#c65fa8", "#a08a10", "#7d6be0", "#d8504d", "#4aa5b5")
STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "path",  # the same in every browser
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Plot(NamedTuple):
    """A figure and what it shows."""

    title: str
    figure: Figure
    note: str = ""


class Series(NamedTuple):
    """One run in one setting: a colour of its own in every plot."""

    label: str
    figures: SettingFigures
    color: str


def report_plots(measured: Sequence[Measured], comparisons: Sequence[Comparison]) -> list[Plot]:
    """Every plot of a report; those with nothing to show are left out."""
    series = list(_series(measured))
    with mpl.rc_context(STYLE):
        plots = [*_ratios(comparisons), by_task(series), *by_position(series), spread_of_tau(series)]
        return plots + [plot for plot in (by_context(series),) if plot is not None]


def svg(plot: Plot, name: str) -> str:
    """The figure as an <svg> element whose ids begin with `name`, so that several fit in one page."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}):
        plot.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text).replace('href="#', f'href="#{name}-')
    return text.replace("url(#", f"url(#{name}-").replace(INK, "currentColor")


def by_task(series: Sequence[Series]) -> Plot:
    """Accepted length of every task and category."""
    names = list(dict.fromkeys(name for one in series for name in one.figures.groups))
    figure = Figure(figsize=(max(6.0, 0.42 * len(names) * max(2, len(series)) + 1.5), 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(series)
    for i, one in enumerate(series):
        shown = [(j, part.tau) for j, name in enumerate(names) if (part := one.figures.groups.get(name)) is not None]
        places = [j + (i - (len(series) - 1) / 2) * width for j, _ in shown]
        values = [tau.value or 0.0 for _, tau in shown]
        errors = np.array([_error(tau) for _, tau in shown]).reshape(-1, 2).T
        axes.bar(places, values, 0.92 * width, color=one.color, label=one.label)
        axes.errorbar(places, values, errors, fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(names)), names, rotation=25 if len(names) > 6 else 0)
    _finish(axes, "", "τ, tokens a round", bottom=0.0)
    _legend(figure, axes, len(series))
    return Plot("Accepted length by task", figure, "Dotted: plain decoding. Bars: 95 % intervals.")


def by_position(series: Sequence[Series]) -> Iterator[Plot]:
    """Conditional acceptance and prefix survival along the block, one panel a category."""
    kinds: tuple[tuple[str, Callable[[Figures], list[Estimate]], str], ...] = (
        ("Conditional acceptance by position", lambda part: part.conditional, "P(accepted | all before accepted)"),
        ("Prefix survival by position", lambda part: part.survival, "P(accepted, and all before)"),
    )
    names = list(dict.fromkeys(name for one in series for name in one.figures.categories))
    for title, pick, label in kinds:
        figure = Figure(figsize=(max(5.0, 3.0 * len(names)), 3.0), layout="constrained")
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            for one in series:
                part = one.figures.categories.get(name)
                if part is not None:
                    _line(axes, pick(part), one)
            axes.set_title(name)
            _finish(axes, "draft position", label if axes is panels[0] else "", bottom=0.0)
            axes.set_ylim(0, 1.02)
        _legend(figure, panels[0], len(series))
        yield Plot(title, figure)


def spread_of_tau(series: Sequence[Series]) -> Plot:
    """How τ is spread: tokens put out by single rounds, and the mean of each prompt."""
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(series)
    for i, one in enumerate(series):
        counts = np.array(one.figures.everything.outputs[1:], dtype=float)
        places = np.arange(1, len(counts) + 1) + (i - (len(series) - 1) / 2) * width
        left.bar(places, counts / max(1.0, counts.sum()), 0.92 * width, color=one.color, label=one.label)
    left.set_title("tokens of a round")
    left.xaxis.get_major_locator().set_params(integer=True)
    _finish(left, "tokens, the bonus counted", "share of rounds", bottom=0.0)
    taus = [one.figures.everything.prompt_tau for one in series]
    edges = np.linspace(min(min(t, default=1.0) for t in taus), max(max(t, default=2.0) for t in taus) + 1e-6, 21)
    for one, values in zip(series, taus, strict=True):
        right.hist(values, edges, histtype="step", color=one.color, linewidth=1.4)
    right.set_title("τ of a prompt")
    _finish(right, "τ", "prompts", bottom=0.0)
    _legend(figure, left, len(series))
    return Plot("Distribution of τ", figure)


def by_context(series: Sequence[Series]) -> Plot | None:
    """τ by context length; None where all contexts are short."""
    spreads = [one.figures.spread["context length"] for one in series]
    names = max((list(spread) for spread in spreads), key=len)
    if len(names) < 2:
        return None
    figure = Figure(figsize=(6.0, 3.0), layout="constrained")
    axes = figure.subplots()
    for one, spread in zip(series, spreads, strict=True):
        _line(axes, [spread[name].tau if name in spread else Estimate(None) for name in names], one)
    axes.set_xticks(range(1, len(names) + 1), names)
    _finish(axes, "tokens of context", "τ, tokens a round")
    _legend(figure, axes, len(series))
    return Plot("Accepted length by context length", figure)


def _ratios(comparisons: Sequence[Comparison]) -> Iterator[Plot]:
    """The ratio of τ of each comparison, with its interval."""
    for comparison in comparisons:
        shown = [d for d in comparison.differences if d.metric == "tau" and d.ratio.value is not None]
        if shown:
            yield Plot(
                f"τ of {comparison.second} over {comparison.first}",
                _forest(shown),
                "Ratio and 95 % interval, paired by prompt. Full dots: significant.",
            )


def _forest(shown: Sequence[Difference]) -> Figure:
    figure = Figure(figsize=(7.0, 0.8 + 0.24 * len(shown)), layout="constrained")
    axes = figure.subplots()
    settings: list[Setting] = list(dict.fromkeys(d.setting for d in shown))
    for i, d in enumerate(shown):
        color = COLORS[settings.index(d.setting) % len(COLORS)]
        error = np.array(_error(d.ratio)).reshape(2, 1)
        face = color if d.is_significant else "none"
        axes.errorbar(d.ratio.value, i, xerr=error, fmt="o", color=color, markerfacecolor=face, capsize=2)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(shown)), [f"{d.group}, {d.setting.label}" for d in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ratio of τ")
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    return figure


def _series(measured: Sequence[Measured]) -> Iterator[Series]:
    number = 0
    for one in measured:
        for setting in one.settings:
            name = setting.setting.label if len(measured) == 1 else f"{one.run.name}, {setting.setting.label}"
            yield Series(name, setting, COLORS[number % len(COLORS)])
            number += 1


def _line(axes: Axes, values: Sequence[Estimate], one: Series) -> None:
    known = [(i, value) for i, value in enumerate(values, start=1) if value.value is not None]
    places, points = [i for i, _ in known], [value.value or 0.0 for _, value in known]
    errors = np.array([_error(value) for _, value in known]).reshape(-1, 2).T
    axes.errorbar(places, points, errors, color=one.color, marker="o", markersize=3.5, capsize=2, label=one.label)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _error(estimate: Estimate) -> tuple[float, float]:
    """Distances of the interval's ends from the value, never negative."""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return 0.0, 0.0
    return max(0.0, estimate.value - estimate.low), max(0.0, estimate.high - estimate.value)


def _finish(axes: Axes, xlabel: str, ylabel: str, bottom: float | None = None) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    if bottom is not None:
        axes.set_ylim(bottom=bottom)


def _legend(figure: Figure, axes: Axes, num_series: int) -> None:
    if num_series > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=min(4, num_series))
