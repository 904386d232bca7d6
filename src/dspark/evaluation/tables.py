"""The tables of a report, as data: the console and the page print the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dspark.evaluation.compare import Comparison
from dspark.evaluation.results import Run
from dspark.evaluation.rows import Setting
from dspark.evaluation.stats import Estimate, Figures
from dspark.evaluation.summary import SettingFigures


class Cell(NamedTuple):
    """A value, and its interval in smaller type where there is room."""

    text: str
    detail: str = ""


class Table(NamedTuple):
    """`labels` columns stand left, the others right; `note` says how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    labels: int
    note: str = ""


class Measured(NamedTuple):
    """A run and its figures."""

    run: Run
    settings: list[SettingFigures]


def report_tables(measured: Sequence[Measured], comparisons: Sequence[Comparison]) -> list[Table]:
    """Every table of a report, the most asked for first; those without rows are left out."""
    tables = [
        *(comparison_table(comparison) for comparison in comparisons),
        main_table(measured),
        position_table(
            measured,
            "Conditional acceptance by position",
            lambda part: part.conditional,
            "Of the rounds that accepted every draft before it, the share that accepted the draft at this position.",
        ),
        position_table(
            measured,
            "Prefix survival by position",
            lambda part: part.survival,
            "The share of rounds that accepted the draft at this position and all before it.",
        ),
        *spread_tables(measured),
        left_out_table(measured),
    ]
    return [table for table in tables if table.rows]


def main_table(measured: Sequence[Measured]) -> Table:
    """One row a task, category and all, in each setting and run."""
    columns = (
        "setting", "prompts", "rounds", "τ", "accepted", "drafts/round", "verified",
        "tok/s", "plain", "speed-up", "with prefill", "= plain",
    )  # fmt: skip
    rows = []
    for labels, part in _groups(measured):
        rates = (part.acceptance_rate, part.drafts_per_round, part.verify_rate)
        speeds = (part.tokens_per_second, part.plain_tokens_per_second)
        rows.append(
            (
                *labels,
                Cell(str(part.prompts)),
                Cell(str(part.rounds)),
                number(part.tau),
                *(number(rate) for rate in rates),
                *(number(speed, 1) for speed in speeds),
                number(part.speedup),
                number(part.speedup_with_prefill),
                number(part.same_as_plain),
            )
        )
    note = (
        "τ: tokens a round, the bonus counted. accepted: share of the verified drafts. verified: share of the "
        "proposed drafts. tok/s: of decode rounds; plain: without the drafter, on the same prompts. = plain: greedy "
        "answers that are plain decoding's. Intervals: 95 %, bootstrap over prompts."
    )
    return _with_labels(measured, "Accepted length and speed", columns, rows, note)


def position_table(
    measured: Sequence[Measured], title: str, pick: Callable[[Figures], list[Estimate]], note: str
) -> Table:
    """Estimates by draft position, from 1."""
    width = max((len(pick(part)) for _, part in _groups(measured)), default=0)
    rows = []
    for labels, part in _groups(measured):
        values = [number(value) for value in pick(part)]
        rows.append((*labels, *values, *[Cell("–")] * (width - len(values))))
    return _with_labels(measured, title, ("setting", *(str(i + 1) for i in range(width))), rows, note)


def spread_tables(measured: Sequence[Measured]) -> Iterator[Table]:
    """By context length and script, where there is more than one; all tasks together."""
    kinds = [kind for part in measured[0].settings[:1] for kind in part.spread]
    for kind in kinds:
        rows = []
        for one in measured:
            for setting in one.settings:
                for name, part in setting.spread[kind].items():
                    rows.append(
                        (
                            Cell(one.run.name),
                            Cell(name),
                            Cell(setting.setting.label),
                            Cell(str(part.prompts)),
                            Cell(str(part.rounds)),
                            number(part.tau),
                            number(part.acceptance_rate),
                        )
                    )
        if len({row[1] for row in rows}) > 1:
            columns = ("setting", "prompts", "rounds", "τ", "accepted")
            yield _with_labels(measured, f"By {kind}", columns, rows, "All tasks together.", kind)


def left_out_table(measured: Sequence[Measured]) -> Table:
    """Prompts that could not be answered."""
    rows = [
        (Cell(one.run.name), Cell(prompt), Cell(error))
        for one in measured
        for prompt, error in one.run.left_out.items()
    ]
    return Table("Prompts left out", ("run", "prompt", "reason"), rows, 3)


def comparison_table(comparison: Comparison) -> Table:
    """One row a group, setting and figure."""
    names = {"tau": "τ", "acceptance_rate": "accepted", "speedup": "speed-up"}
    rows = []
    for d in comparison.differences:
        p_value = "< 0.001" if d.p_value < 0.001 else f"{d.p_value:.3f}"
        rows.append(
            (
                Cell(names[d.metric]),
                Cell(d.group),
                Cell(d.setting.label),
                Cell(str(d.prompts)),
                Cell(f"{d.first:.3f}"),
                Cell(f"{d.second:.3f}"),
                number(d.difference, 3, sign=True),
                number(d.ratio, 3),
                Cell(p_value + (" *" if d.is_significant else "")),
            )
        )
    columns = ("figure", "task", "setting", "prompts", comparison.first, comparison.second, "difference", "ratio", "p")
    note = (
        f"Paired by prompt: the same resampled prompts for both ({comparison.unpaired} answers that only one run has "
        "are left out). p: of no difference, two-sided, bootstrap; * marks p < 0.05. With many rows, one in twenty is "
        "marked by chance."
    )
    return Table(f"{comparison.second} against {comparison.first}", columns, rows, 3, note)


def about_table(measured: Sequence[Measured]) -> Table:
    """What the runs are of."""
    keys = list(dict.fromkeys(key for one in measured for key in one.run.about))
    rows = [(Cell(key), *(Cell(str(one.run.about.get(key, ""))) for one in measured)) for key in keys]
    return Table("Measured", ("", *(one.run.name for one in measured)), rows, 1 + len(measured))


def number(estimate: Estimate, digits: int = 2, sign: bool = False) -> Cell:
    """1.68 and its interval; a dash where there is no value."""
    if estimate.value is None:
        return Cell("–")
    form = f"{'+' if sign else ''}.{digits}f"
    detail = "" if estimate.low is None else f"{estimate.low:{form}} … {estimate.high:{form}}"
    return Cell(f"{estimate.value:{form}}", detail)


def _groups(measured: Sequence[Measured]) -> Iterator[tuple[tuple[Cell, Cell, Cell], Figures]]:
    """(run, task, setting) and the figures: settings of a task stand together, runs of a setting too."""
    order: dict[tuple[str, Setting], list[tuple[str, Figures]]] = {}
    for one in measured:
        for setting in one.settings:
            for name, part in setting.groups.items():
                order.setdefault((name, setting.setting), []).append((one.run.name, part))
    names = list(dict.fromkeys(name for name, _ in order))
    for name, setting in sorted(order, key=lambda key: names.index(key[0])):
        for run, part in order[name, setting]:
            yield (Cell(run), Cell(name), Cell(setting.label)), part


def _with_labels(
    measured: Sequence[Measured],
    title: str,
    columns: tuple[str, ...],
    rows: list[tuple[Cell, ...]],
    note: str,
    kind: str = "task",
) -> Table:
    """Rows that begin with (run, `kind`, …); the run's column is left out where there is one only."""
    if len(measured) == 1:
        return Table(title, (kind, *columns), [row[1:] for row in rows], 2, note)
    return Table(title, ("run", kind, *columns), rows, 3, note)
