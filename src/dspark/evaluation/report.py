"""A report of one run or several: on the console, as JSON, and as a page."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dspark.errors import DataError
from dspark.evaluation.compare import Comparison
from dspark.evaluation.config import ReportOptions
from dspark.evaluation.page import page
from dspark.evaluation.plots import report_plots
from dspark.evaluation.results import Run
from dspark.evaluation.stats import to_json
from dspark.evaluation.summary import summarise
from dspark.evaluation.tables import Cell, Measured, Table, about_table, first_tables, further_tables
from dspark.files import atomic_path
from dspark.log import get_logger

_log = get_logger(__name__)

FILE_WIDTH = 160  # columns where the output is no terminal
INTERVALS = ("τ", "speed-up", "ratio")  # columns whose intervals the console shows, as half their width


def give(out: Path, stem: str, runs: Sequence[Run], comparisons: Sequence[Comparison], options: ReportOptions) -> None:
    """Write `stem`.json and `stem`.html into `out` and print the tables, or the JSON. Raises `DataError`."""
    measured = [Measured(run, summarise(run.rows)) for run in runs]
    for one in measured:
        if not one.settings:
            raise DataError(f"{one.run.name}: no prompt was answered ({next(iter(one.run.left_out.values()), 'none')})")
    told = as_dict(measured, comparisons)
    first, further, plots = (
        first_tables(measured, comparisons),
        further_tables(measured),
        report_plots(measured, comparisons),
    )
    names = [run.name for run in runs]
    title = f"{', '.join(names[1:])} against {names[0]}" if comparisons else ", ".join(names)
    write(out / f"{stem}.json", json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    write(out / f"{stem}.html", page(title, about_table(measured), first, plots, further))
    if options.json_output:
        sys.stdout.write(json.dumps(told, ensure_ascii=False) + "\n")
    else:
        show([*first, *further])
    _log.info("%s, %s", out / f"{stem}.json", out / f"{stem}.html")


def as_dict(measured: Sequence[Measured], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The report for JSON."""
    runs = [
        {
            "name": one.run.name,
            "about": one.run.about,
            "settings": to_json(one.settings),
            "left_out": one.run.left_out,
        }
        for one in measured
    ]
    return {"runs": runs, "comparisons": to_json(list(comparisons))}


def show(tables: Sequence[Table]) -> None:
    """Print tables to stdout; the page has their intervals in full."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    for table in tables:
        console.print(_rich(table))


def _rich(table: Table) -> RichTable:
    printed = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(table.columns):
        printed.add_column(name, justify="left" if i < table.labels else "right", no_wrap=True)
    for row in table.rows:
        printed.add_row(*(_text(cell, name in INTERVALS) for name, cell in zip(table.columns, row, strict=True)))
    return printed


def _text(cell: Cell, with_interval: bool) -> Text:
    shown = Text(cell.text)
    return shown.append(f" {cell.half_width}", "dim") if with_interval else shown


def write(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
