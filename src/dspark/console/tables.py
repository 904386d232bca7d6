"""What `dspark train` prints on stdout: with --dry-run what a run would take and touch, at its end what came of it."""

from rich.console import Console
from rich.table import Table

from dspark.training.plan import TrainPlan
from dspark.training.trainer import TrainReport


def show(rows: list[tuple[str, str]]) -> None:
    """Print names and values as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    Console(highlight=False).print(table)


def plan_rows(p: TrainPlan) -> list[tuple[str, str]]:
    """What a run would take."""
    unknown = "known when the cache is built"
    return [
        ("target", f"{count(p.target_parameters)} parameters, held in float32"),
        ("drafter", f"{count(p.drafter_parameters)} parameters, {count(p.trained_parameters)} of them trained"),
        ("processes", str(p.num_processes)),
        ("step", f"{p.sequences_per_step} sequences, up to {p.anchors_per_step} anchors"),
        ("steps", unknown if p.steps is None else f"{p.steps:,}"),
        ("data", unknown if p.num_tokens is None else f"{p.num_samples:,} samples, {count(p.num_tokens)} tokens"),
        ("memory", f"about {size(p.memory_bytes)} a process"),
        ("  weights", size(p.weights_bytes)),
        ("  gradients, moments", size(p.optimizer_bytes)),
        ("  one micro-batch", size(p.batch_bytes)),
        ("disk", f"up to {size(p.disk_bytes)} (a state: {size(p.state_bytes)}; a drafter: {size(p.drafter_bytes)})"),
        ("reads", ", ".join(map(str, p.reads))),
        (
            "writes",
            ", ".join(map(str, (*p.writes, p.writes[0].parent / "states", p.writes[0].parent / "metrics.jsonl"))),
        ),
    ]


def report_rows(r: TrainReport) -> list[tuple[str, str]]:
    """What came of a run; figures are averages over its last logged steps."""
    rows = [("steps", f"{r.step:,} of {r.total_steps:,}, {r.seconds / 60:.1f} minutes this time")]
    for key, name in (("loss", "loss"), ("tau", "tau, teacher-forced"), ("tokens_per_second", "tokens/s")):
        if key in r.figures:
            rows.append((name, f"{r.figures[key]:.3g}"))
    if r.best.step:
        rows.append(("accepted length", f"{r.best.accepted_length:.3f} at step {r.best.step} (best/)"))
    rows.append(("drafter", str(r.out / ("best" if r.best.step else "last"))))
    return rows


def count(number: int) -> str:
    """12,345,678 -> 12.3 M."""
    for unit, name in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
