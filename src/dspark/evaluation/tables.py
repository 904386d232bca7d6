"""The tables of a report, as data: the console and the page print the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dspark.evaluation.compare import METRICS, Comparison
from dspark.evaluation.results import Run
from dspark.evaluation.rows import Setting
from dspark.evaluation.stats import Estimate, Figures
from dspark.evaluation.summary import SettingFigures


class Cell(NamedTuple):
    """A value, and its interval: in full where there is room, else half its width."""

    text: str
    interval: str = ""
    half_width: str = ""


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


def first_tables(measured: Sequence[Measured], comparisons: Sequence[Comparison]) -> list[Table]:
    """What is most asked for: comparisons, then accepted lengths and speeds."""
    return [
        *(comparison_table(comparison) for comparison in comparisons),
        length_table(measured),
        speed_table(measured),
    ]


def further_tables(measured: Sequence[Measured]) -> list[Table]:
    """The others; those without rows are left out."""
    tables = [
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
        confidence_table(measured),
        left_out_table(measured),
    ]
    return [table for table in tables if table.rows]


def length_table(measured: Sequence[Measured]) -> Table:
    """One row a task, category and all, in each setting and run."""
    columns = ("setting", "prompts", "rounds", "τ", "accepted", "drafts", "verified")
    rows: list[tuple[Cell, ...]] = []
    for labels, part in _groups(measured):
        rates = (part.tau, part.acceptance_rate, part.drafts_per_round, part.verify_rate)
        rows.append((*labels, Cell(str(part.prompts)), Cell(str(part.rounds)), *map(number, rates)))
    note = (
        "τ: tokens a round, the bonus counted. accepted: share of the verified drafts. drafts: verified a round. "
        "verified: share of the proposed drafts. Intervals: 95 %, bootstrap over prompts."
    )
    return _with_labels(measured, "Accepted length", columns, rows, note)


def speed_table(measured: Sequence[Measured]) -> Table:
    """Tokens a second and the ratio to plain decoding; the same rows."""
    columns = ("setting", "tok/s", "plain", "speed-up", "with prefill", "= plain")
    rows: list[tuple[Cell, ...]] = []
    for labels, part in _groups(measured):
        speeds = [number(speed, 1) for speed in (part.tokens_per_second, part.plain_tokens_per_second)]
        rows.append((*labels, *speeds, *map(number, (part.speedup, part.speedup_with_prefill, part.same_as_plain))))
    note = (
        "tok/s: new tokens a second of decode rounds, of the whole batch; plain: without the drafter, on the same "
        "prompts in the same run. = plain: share of greedy answers whose text is plain decoding's."
    )
    return _with_labels(measured, "Speed", columns, rows, note)


def position_table(
    measured: Sequence[Measured], title: str, pick: Callable[[Figures], list[Estimate]], note: str
) -> Table:
    """Estimates by draft position, from 1."""
    width = max((len(pick(part)) for _, part in _groups(measured)), default=0)
    rows: list[tuple[Cell, ...]] = []
    for labels, part in _groups(measured):
        values = [number(value) for value in pick(part)]
        rows.append((*labels, *values, *[Cell("–")] * (width - len(values))))
    return _with_labels(measured, title, ("setting", *(str(i + 1) for i in range(width))), rows, note)


def spread_tables(measured: Sequence[Measured]) -> Iterator[Table]:
    """By context length and script, where there is more than one; all tasks together."""
    kinds = [kind for part in measured[0].settings[:1] for kind in part.spread]
    for kind in kinds:
        rows: list[tuple[Cell, ...]] = []
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


def confidence_table(measured: Sequence[Measured]) -> Table:
    """Predicted against measured survival of each position, all tasks together."""
    rows: list[tuple[Cell, ...]] = []
    for one in measured:
        for part in one.settings:
            for p in () if part.confidence is None else part.confidence.positions:
                values = (p.ece, p.ece_noise, p.brier, p.auc, p.confidence, p.survival)
                shown = (Cell("–" if value is None else f"{value:.3f}") for value in values)
                rows.append((Cell(one.run.name), Cell(f"{p.position}"), Cell(part.setting.label), *shown))
    columns = ("setting", "ECE", "by chance", "Brier", "AUC", "predicted", "measured")
    note = (
        "Survival of the draft and all before it, as the confidence head predicts it, not calibrated. ECE: calibration "
        "error, 15 bins; by chance: what perfect confidences would show on so few rounds. Of full-width rounds."
    )
    return _with_labels(measured, "Confidence by position", columns, rows, note, "position")


def left_out_table(measured: Sequence[Measured]) -> Table:
    """Prompts that could not be answered."""
    rows: list[tuple[Cell, ...]] = [
        (Cell(one.run.name), Cell(prompt), Cell(error))
        for one in measured
        for prompt, error in one.run.left_out.items()
    ]
    return Table("Prompts left out", ("run", "prompt", "reason"), rows, 3)


def comparison_table(comparison: Comparison) -> Table:
    """One row a group, setting and figure."""
    names = {"tau": "τ", "acceptance_rate": "accepted", "speedup": "speed-up"}
    rows: list[tuple[Cell, ...]] = []
    for d in sorted(comparison.differences, key=lambda d: METRICS.index(d.metric)):
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
    text = f"{estimate.value:{form}}"
    if estimate.low is None or estimate.high is None:
        return Cell(text)
    half_width = (estimate.high - estimate.low) / 2
    return Cell(text, f"{estimate.low:{form}} … {estimate.high:{form}}", f"±{half_width:.{digits}f}")


def _groups(measured: Sequence[Measured]) -> Iterator[tuple[tuple[Cell, Cell, Cell], Figures]]:
    """(run, task, setting) and the figures: settings of a task stand together, runs of a setting too."""
    order: dict[tuple[str, Setting], list[tuple[str, Figures]]] = {}
    for one in measured:
        for settled in one.settings:
            for name, part in settled.groups.items():
                order.setdefault((name, settled.setting), []).append((one.run.name, part))
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
