"""What `dspark simulate` gives: a table, simulation.json, simulation.html, and the plots as files of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import matplotlib as mpl

from dspark.evaluation import report
from dspark.evaluation.config import SimulateOptions
from dspark.evaluation.drawing import STYLE
from dspark.evaluation.page import page
from dspark.evaluation.published import Published
from dspark.evaluation.simulate import Point, shape_error, simulate
from dspark.evaluation.simulation_plots import NAMES, simulation_plots
from dspark.evaluation.tables import Cell, Table
from dspark.files import atomic_path
from dspark.log import get_logger

_log = get_logger(__name__)


def run(options: SimulateOptions) -> None:
    """Simulate, write the files and print the table, or the JSON. Raises ConfigError or DataError."""
    points = simulate(options)
    own = options.costs is None and options.acceptance is None and not options.chances
    published = Published.load() if own else None
    told = {"options": json.loads(options.model_dump_json()), "points": [asdict(point) for point in points]}
    closed = [point for point in points if point.arrivals is None]
    if published is not None and options.concurrency in ((), published.concurrency):
        told["shape_error"] = shape_error(closed, published)
    table, plots = points_table(points), simulation_plots(points, published)
    report.write(options.out / "simulation.json", json.dumps(told, indent=1) + "\n")
    report.write(options.out / "simulation.html", page("Simulation", about(options), [table], plots, []))
    for plot, name in zip(plots, ("speed.png", "budget.png"), strict=True):
        with atomic_path(options.out / name) as path, mpl.rc_context(STYLE):
            plot.figure.savefig(path, dpi=150)
    if options.report.json_output:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        report.show([table])
    _log.info("%s", options.out / "simulation.html")


def points_table(points: Sequence[Point]) -> Table:
    """A row a load and policy."""
    rows = []
    for point in points:
        load = f"{point.concurrency:.0f}" if point.arrivals is None else f"{point.arrivals:g}/s"
        numbers = (
            f"{point.concurrency:.1f}",
            f"{point.tokens_per_second:,.0f}",
            f"{point.user_tokens_per_second:.1f}",
            f"{point.accepted_length:.2f}",
            f"{point.verify_budget:.2f}",
            f"{point.drafted_share:.2f}",
            "–" if point.arrivals is None else f"{point.wait_seconds:.2f}",
        )
        rows.append((Cell(load), Cell(NAMES[point.policy]), *map(Cell, numbers)))
    columns = ("load", "policy", "active", "tok/s", "a user", "τ", "drafts", "drafting", "wait")
    note = (
        "load: requests at any time, or arrivals a second; active: requests decoded together, on average; a user: "
        "tok/s of each; drafts: verified, per request and round; drafting: share of the requests that are drafted for; "
        "wait: seconds until a request is decoded."
    )
    return Table("Loads", columns, rows, 2, note)


def about(options: SimulateOptions) -> Table:
    """What was simulated."""
    law = "published accepted lengths"
    if options.acceptance is not None:
        law = f"rounds of {options.acceptance}"
    elif options.chances:
        law = ", ".join(f"{chance:g}" for chance in options.chances)
    rows = [
        ("costs of rounds", "published throughputs" if options.costs is None else str(options.costs)),
        ("acceptance", law),
        ("tokens of an answer", f"{options.length:g}, exponential"),
        ("seed", str(options.seed)),
    ]
    return Table("Simulated", ("", ""), [(Cell(name), Cell(value)) for name, value in rows], 2)
