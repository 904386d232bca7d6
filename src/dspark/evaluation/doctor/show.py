"""The doctor's report on stdout: a table of checks, acceptance by context and slot, and the verdict; or JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.evaluation.doctor.config import DoctorOptions
from dspark.evaluation.doctor.examine import examine
from dspark.evaluation.doctor.report import Diagnosis

STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def doctor(options: DoctorOptions) -> int:
    """Examine the pair and print what was found. Returns the exit code: 0 healthy, 1 a fault."""
    diagnosis = examine(options)
    if options.json_output:
        sys.stdout.write(json.dumps(diagnosis.as_dict(), ensure_ascii=False) + "\n")
    else:
        show(diagnosis, Console(highlight=False))
    return diagnosis.exit_code


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis for a person."""
    table = Table(box=None, pad_edge=False)
    for column in ("check", "", "finding"):
        table.add_column(column)
    for check in diagnosis.checks:
        table.add_row(check.name, Text(check.status, STYLES[check.status]), Text(check.finding))
    console.print(Text(f"target {diagnosis.target}, drafter {diagnosis.drafter}", "bold"))
    console.print(table)
    for check in diagnosis.checks:
        if "by_context" in check.figures:
            console.print(by_context(check.figures["by_context"]))
    first = diagnosis.first
    if first is None:
        console.print(Text("healthy: no two of the paths part, and no change tried drafts better", "bold green"))
        return
    console.print(Text(f"first fault: {first.fault}, at the check of {first.name}", "bold red"))
    console.print(Text(f"{first.finding}"))
    console.print(Text(f"change: {first.change}"))


def by_context(rows: list[dict[str, Any]]) -> Table:
    """Share of drafts that are the target's choice, by tokens of context and draft slot."""
    table = Table(title="acceptance by context and slot", title_justify="left", box=None, pad_edge=False)
    table.add_column("context")
    table.add_column("anchors", justify="right")
    for slot in range(len(rows[0]["by_slot"]) if rows else 0):
        table.add_column(str(slot + 1), justify="right")
    for row in rows:
        shares = ("" if share is None else f"{share:.2f}" for share in row["by_slot"])
        table.add_row(f"{row['from']}-{row['to']}", str(row["anchors"]), *shares)
    return table
