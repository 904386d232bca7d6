"""How plots are drawn: their style, one series in all of them, and the page's colour for text and axes, so that they
read on light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dspark.evaluation.stats import Estimate
from dspark.evaluation.summary import SettingFigures

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


def svg(plot: Plot, name: str) -> str:
    """The figure as an <svg> element whose ids begin with `name`, so that several fit in one page."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}):
        plot.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text).replace('href="#', f'href="#{name}-')
    return text.replace("url(#", f"url(#{name}-").replace(INK, "currentColor")


def line(axes: Axes, values: Sequence[Estimate], one: Series, aside: float) -> None:
    """Values at 1, 2, 3 … with their intervals, `aside` of it."""
    known = {i: value for i, value in enumerate(values, start=1) if value.value is not None}
    places, points = [i + aside for i in known], [value.value or 0.0 for value in known.values()]
    drawn = axes.errorbar(places, points, errors(known.values()), color=one.color, marker="o", markersize=3, capsize=2)
    drawn[0].set_linestyle(one.line)


def shift(number: int, series: Sequence[Series]) -> float:
    """Keeps the whiskers of several series apart."""
    return 0.05 * (number - (len(series) - 1) / 2)


def errors(estimates: Iterable[Estimate]) -> np.ndarray:
    """[2, n]: distances of the intervals' ends from the values, never negative."""
    ends = [(e.value or 0.0, e.low, e.high) for e in estimates]
    found = [
        (value - low, high - value) if low is not None and high is not None else (0, 0) for value, low, high in ends
    ]
    below_above: np.ndarray = np.maximum(0.0, np.array(found, dtype=float).reshape(-1, 2).T)
    return below_above


def finish(axes: Axes, xlabel: str, ylabel: str) -> None:
    """Labels and a quiet grid."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)


def legend(figure: Figure, series: Sequence[Series]) -> None:
    """Colours and lines; nothing for a single series."""
    if len(series) > 1:
        handles = [Line2D([], [], color=one.color, linestyle=one.line, linewidth=2, label=one.label) for one in series]
        longest = max(len(one.label) for one in series)
        columns = max(1, min(len(series), int(figure.get_figwidth() * 12 / (longest + 8))))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)
