"""The plots of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dspark.evaluation.compare import Comparison, Difference
from dspark.evaluation.drawing import (
    COLORS,
    GRID,
    INK,
    LINES,
    STYLE,
    WIDTH,
    Plot,
    Series,
    errors,
    finish,
    legend,
    line,
    shift,
)
from dspark.evaluation.reliability import confidence_figure
from dspark.evaluation.stats import Estimate, Figures
from dspark.evaluation.summary import CONTEXT
from dspark.evaluation.tables import Measured


def report_plots(measured: Sequence[Measured], comparisons: Sequence[Comparison]) -> list[Plot]:
    """Every plot of a report; those with nothing to show are left out."""
    series = list(_series(measured))
    with mpl.rc_context(STYLE):
        plots = [*_ratios(comparisons), by_task(series), *by_position(series), spread_of_tau(series)]
        if max(len(one.figures.spread[CONTEXT]) for one in series) > 1:
            plots.append(by_context(series))
        return [*plots, *_confidence(measured)]


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
            axes.errorbar(places, values, errors(shown.values()), fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(setting.label)
        finish(axes, "", "τ, tokens a round")
    panels[-1].set_xticks(range(len(names)), names, rotation=20 if len(names) > 9 else 0)
    legend(figure, series)
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
                    line(axes, pick(one.figures.categories[name]), one, shift(i, series))
            axes.set_title(name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            finish(axes, "draft position", label if axes is panels[0] else "")
            axes.set_ylim(0, 1.02)
        legend(figure, series)
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
    finish(left, "tokens, the bonus counted", "share of rounds")
    right.set_title("τ of a prompt")
    finish(right, "τ", "share of prompts at or below")
    legend(figure, series)
    return Plot("Distribution of τ", figure)


def by_context(series: Sequence[Series]) -> Plot:
    """τ by context length."""
    spreads = [one.figures.spread[CONTEXT] for one in series]
    names = max((list(spread) for spread in spreads), key=len)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    for i, (one, spread) in enumerate(zip(series, spreads, strict=True)):
        values = [spread[name].tau if name in spread else Estimate(None) for name in names]
        line(axes, values, one, shift(i, series))
    axes.set_xticks(range(1, len(names) + 1), names)
    finish(axes, "tokens of context", "τ, tokens a round")
    legend(figure, series)
    return Plot("Accepted length by context length", figure, "Whiskers: 95 % intervals.")


def _confidence(measured: Sequence[Measured]) -> Iterator[Plot]:
    """Reliability and threshold sweep of each drafter that has a confidence head, over its settings."""
    note = "All tasks, full-width rounds, not calibrated. A dot's area is its share of the rounds."
    for one in measured:
        reports = {p.setting.label: p.confidence for p in one.settings[: len(COLORS)] if p.confidence is not None}
        if reports:
            yield Plot(f"Confidence of {one.run.name}", confidence_figure(reports), note)


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
        axes.errorbar(d.ratio.value, i, xerr=errors([d.ratio]), fmt="o", color=color, mfc=face, capsize=2)
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
