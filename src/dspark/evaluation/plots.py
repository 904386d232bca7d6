"""The plots of a report. Text and axes take the page's colour, so that they read on light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dspark.evaluation.compare import Comparison, Difference
from dspark.evaluation.stats import Estimate, Figures
from dspark.evaluation.summary import CONTEXT, SettingFigures
from dspark.evaluation.tables import Measured

WIDTH = 9.0  # inches
INK = "#010203"  # becomes currentColor
GRID = {"color": "#808080", "alpha": 0.25, "linewidth": 0.6}
COLORS = ("#3d85d8", "#e07b28", "#2a9d6f", "#c65fa8", "#a08a10", "#7d6be0", "#d8504d", "#4aa5b5")
LINES = ("-", "--", ":", "-.")
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
    """One run in one setting, drawn alike in every plot. Runs differ by colour and their settings by line; the settings
    of a single run by colour."""

    label: str
    figures: SettingFigures
    color: str
    line: str


def report_plots(measured: Sequence[Measured], comparisons: Sequence[Comparison]) -> list[Plot]:
    """Every plot of a report; those with nothing to show are left out."""
    series = list(_series(measured))
    with mpl.rc_context(STYLE):
        plots = [*_ratios(comparisons), by_task(series), *by_position(series), spread_of_tau(series)]
        if max(len(one.figures.spread[CONTEXT]) for one in series) > 1:
            plots.append(by_context(series))
    return plots


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
    """Accepted length of every task and category, a panel for each setting."""
    names = list(dict.fromkeys(name for one in series for name in one.figures.groups))
    settings = list(dict.fromkeys(one.figures.setting for one in series))
    figure = Figure(figsize=(WIDTH, 2.4 * len(settings) + 0.4), layout="constrained")
    panels = figure.subplots(len(settings), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, setting in zip(panels, settings, strict=True):
        here = [one for one in series if one.figures.setting == setting]
        for i, one in enumerate(here):
            shown = {name: one.figures.groups[name].tau for name in names if name in one.figures.groups}
            places = [names.index(name) + (i - (len(here) - 1) / 2) * 0.8 / len(here) for name in shown]
            values = [tau.value or 0.0 for tau in shown.values()]
            axes.bar(places, values, 0.74 / len(here), color=one.color)
            axes.errorbar(places, values, _errors(shown.values()), fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(setting.label)
        _finish(axes, "", "τ, tokens a round")
    panels[-1].set_xticks(range(len(names)), names, rotation=20 if len(names) > 9 else 0)
    _legend(figure, series)
    return Plot("Accepted length by task", figure, "Dotted: plain decoding. Whiskers: 95 % intervals.")


def by_position(series: Sequence[Series]) -> Iterator[Plot]:
    """Conditional acceptance and prefix survival along the block, one panel a category."""
    kinds: tuple[tuple[str, Callable[[Figures], list[Estimate]], str], ...] = (
        ("Conditional acceptance by position", lambda part: part.conditional, "P(accepted | all before accepted)"),
        ("Prefix survival by position", lambda part: part.survival, "P(accepted, and all before)"),
    )
    names = list(dict.fromkeys(name for one in series for name in one.figures.categories))
    for title, pick, label in kinds:
        figure = Figure(figsize=(min(WIDTH, 1.0 + 4.0 * len(names)), 3.2), layout="constrained")
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            for i, one in enumerate(series):
                if name in one.figures.categories:
                    _line(axes, pick(one.figures.categories[name]), one, _shift(i, series))
            axes.set_title(name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            _finish(axes, "draft position", label if axes is panels[0] else "")
            axes.set_ylim(0, 1.02)
        _legend(figure, series)
        yield Plot(title, figure, "Whiskers: 95 % intervals.")


def spread_of_tau(series: Sequence[Series]) -> Plot:
    """How τ is spread: tokens put out by single rounds, and the mean of each prompt."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, one in enumerate(series):
        counts = np.array(one.figures.everything.outputs[1:], dtype=float)
        places = np.arange(1, len(counts) + 1) + (i - (len(series) - 1) / 2) * 0.8 / len(series)
        face = one.color if one.line == LINES[0] else "none"
        left.bar(places, counts / max(1.0, counts.sum()), 0.74 / len(series), facecolor=face, edgecolor=one.color)
        if one.figures.everything.prompt_tau:
            right.ecdf(one.figures.everything.prompt_tau, color=one.color, linestyle=one.line)
    left.set_title("tokens of a round")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(left, "tokens, the bonus counted", "share of rounds")
    right.set_title("τ of a prompt")
    _finish(right, "τ", "share of prompts at or below")
    _legend(figure, series)
    return Plot("Distribution of τ", figure)


def by_context(series: Sequence[Series]) -> Plot:
    """τ by context length."""
    spreads = [one.figures.spread[CONTEXT] for one in series]
    names = max((list(spread) for spread in spreads), key=len)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    for i, (one, spread) in enumerate(zip(series, spreads, strict=True)):
        values = [spread[name].tau if name in spread else Estimate(None) for name in names]
        _line(axes, values, one, _shift(i, series))
    axes.set_xticks(range(1, len(names) + 1), names)
    _finish(axes, "tokens of context", "τ, tokens a round")
    _legend(figure, series)
    return Plot("Accepted length by context length", figure, "Whiskers: 95 % intervals.")


def _ratios(comparisons: Sequence[Comparison]) -> Iterator[Plot]:
    """The ratio of τ of each comparison, with its interval."""
    note = "Ratio and 95 % interval, paired by prompt. Full dots: significant."
    for comparison in comparisons:
        shown = [d for d in comparison.differences if d.metric == "tau" and d.ratio.value is not None]
        if shown:
            yield Plot(f"τ of {comparison.second} over {comparison.first}", _forest(shown), note)


def _forest(shown: Sequence[Difference]) -> Figure:
    figure = Figure(figsize=(WIDTH, 0.8 + 0.24 * len(shown)), layout="constrained")
    axes = figure.subplots()
    settings = list(dict.fromkeys(d.setting for d in shown))
    for i, d in enumerate(shown):
        color = COLORS[settings.index(d.setting) % len(COLORS)]
        face = color if d.is_significant else "none"
        axes.errorbar(d.ratio.value, i, xerr=_errors([d.ratio]), fmt="o", color=color, mfc=face, capsize=2)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(shown)), [f"{d.group}, {d.setting.label}" for d in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ratio of τ")
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    return figure


def _series(measured: Sequence[Measured]) -> Iterator[Series]:
    for i, one in enumerate(measured):
        for j, part in enumerate(one.settings):
            if len(measured) == 1:
                yield Series(part.setting.label, part, COLORS[j % len(COLORS)], LINES[0])
            else:
                label = f"{one.run.name}, {part.setting.label}"
                yield Series(label, part, COLORS[i % len(COLORS)], LINES[j % len(LINES)])


def _line(axes: Axes, values: Sequence[Estimate], one: Series, shift: float) -> None:
    known = {i: value for i, value in enumerate(values, start=1) if value.value is not None}
    places, points = [i + shift for i in known], [value.value or 0.0 for value in known.values()]
    drawn = axes.errorbar(places, points, _errors(known.values()), color=one.color, marker="o", markersize=3, capsize=2)
    drawn[0].set_linestyle(one.line)


def _shift(number: int, series: Sequence[Series]) -> float:
    """Keeps the whiskers of several series apart."""
    return 0.05 * (number - (len(series) - 1) / 2)


def _errors(estimates: Iterable[Estimate]) -> np.ndarray:
    """[2, n]: distances of the intervals' ends from the values, never negative."""
    ends = [(e.value or 0.0, e.low, e.high) for e in estimates]
    found = [
        (value - low, high - value) if low is not None and high is not None else (0, 0) for value, low, high in ends
    ]
    return np.maximum(0.0, np.array(found, dtype=float).reshape(-1, 2).T)


def _finish(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)


def _legend(figure: Figure, series: Sequence[Series]) -> None:
    """Colours and lines; nothing for a single series."""
    if len(series) > 1:
        handles = [Line2D([], [], color=one.color, linestyle=one.line, linewidth=2, label=one.label) for one in series]
        longest = max(len(one.label) for one in series)
        columns = max(1, min(len(series), int(figure.get_figwidth() * 12 / (longest + 8))))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)
