"""What `dspark load` gives: a table, load.json, load.html, and the plots as files of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import matplotlib as mpl

from dspark.evaluation import report
from dspark.evaluation.drawing import STYLE
from dspark.evaluation.load.config import LoadOptions
from dspark.evaluation.load.figures import LoadFigures, figures, pareto
from dspark.evaluation.load.plots import load_plots
from dspark.evaluation.load.rows import LoadRow
from dspark.evaluation.load.runner import measure
from dspark.evaluation.page import page
from dspark.evaluation.tables import Cell, Table
from dspark.files import atomic_path
from dspark.log import get_logger

LATE_SECONDS = 0.1

_log = get_logger(__name__)


def run(options: LoadOptions) -> None:
    """Measure what is missing, write the files and print the tables, or the JSON. Raises as `measure` does."""
    rows = measure(options)
    points = [figures(row) for row in rows]
    for point in points:
        if (point.sent_late.p90 or 0.0) > LATE_SECONDS:
            _log.warning(
                "%s, %s: a tenth of the requests was sent more than %.2f s late: this machine is the bottleneck",
                point.series,
                point.load,
                point.sent_late.p90,
            )
    front = [f"{point.series}/{point.load}" for point in pareto(points)]
    told = {
        "ask": options.ask.model_dump(mode="json"),
        "points": [{"url": row.url, "model": row.model} | asdict(p) for row, p in zip(rows, points, strict=True)],
        "pareto": front,
    }
    tables, plots = [speed_table(points, front), latency_table(points)], load_plots(points)
    report.write(options.out / "load.json", json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    report.write(options.out / "load.html", page("Load", about(rows, options), tables, plots, []))
    for plot, name in zip(plots, ("pareto.png", "latency.png"), strict=True):
        with atomic_path(options.out / name) as path, mpl.rc_context(STYLE):
            plot.figure.savefig(path, dpi=150)
    if options.report.json_output:
        sys.stdout.write(json.dumps(told, ensure_ascii=False) + "\n")
    else:
        report.show(tables)
    _log.info("%s", options.out / "load.html")


def speed_table(points: Sequence[LoadFigures], front: Sequence[str]) -> Table:
    """Throughput, user speed, accepted length and budget."""
    rows = []
    for point in points:
        numbers = (
            f"{point.requests - point.failed}/{point.requests}",
            f"{point.active:.1f}",
            number(point.tokens_per_second),
            number(point.user_tokens_per_second.p50),
            number(point.accepted_length, 2),
            number(point.verify_budget, 2),
            "*" if f"{point.series}/{point.load}" in front else "",
        )
        rows.append((Cell(point.series), Cell(point.load), *map(Cell, numbers)))
    columns = ("mode", "load", "done", "active", "tok/s", "a user", "τ", "drafts", "front")
    note = (
        "load: requests at a time, or arrivals a second; done: answered, of those asked; active: requests under way, "
        "on average; a user: tok/s of each, median; drafts: verified, per request and round; front: no other load is "
        "better for all and for each."
    )
    return Table("Speed", columns, rows, 2, note)


def latency_table(points: Sequence[LoadFigures]) -> Table:
    """Percentiles, in milliseconds."""
    rows = []
    for point in points:
        spreads = (point.first_token, point.between_pieces, point.whole)
        cells = [Cell(" / ".join(milliseconds(value) for value in (s.p50, s.p90, s.p99))) for s in spreads]
        rows.append((Cell(point.series), Cell(point.load), *cells))
    columns = ("mode", "load", "first token", "between pieces", "whole")
    note = (
        "Milliseconds at the 50th, 90th and 99th percentile. A piece of text holds as many tokens as the server sends "
        "together: with speculation those of a round."
    )
    return Table("Latency, ms", columns, rows, 2, note)


def about(rows: Sequence[LoadRow], options: LoadOptions) -> Table:
    """What was asked of whom."""
    ask = options.ask
    served = dict.fromkeys(f"{row.series}: {row.model} at {row.url}" for row in rows)
    length = f"{ask.max_tokens}" if ask.min_tokens is None else f"{ask.min_tokens} to {ask.max_tokens}"
    told = [
        ("servers", "; ".join(served)),
        ("prompts", ", ".join(ask.tasks) + ("" if ask.prompt_words is None else f", {ask.prompt_words} words each")),
        ("tokens of an answer", f"{length}{', to the end' if ask.ignore_eos else ' at most'}"),
        ("temperature", f"{ask.temperature:g}"),
        ("seed", str(ask.seed)),
    ]
    return Table("Measured", ("", ""), [(Cell(name), Cell(value)) for name, value in told], 2)


def number(value: float | None, digits: int = 1) -> str:
    """A dash for what is not known."""
    return "–" if value is None else f"{value:,.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Three digits at least."""
    return "–" if value is None else f"{1000 * value:.{0 if value >= 0.1 else 1}f}"
