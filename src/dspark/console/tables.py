"""What commands print on stdout as names and values: estimates, what a run would take, what came of it."""

from rich.console import Console
from rich.table import Table

from dspark.cache.estimate import CacheEstimate
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
    part = "" if p.whole_target else " (embedding, final norm and LM head alone)"
    apart = [] if p.target_rank_bytes is None else [("  where the target runs", size(p.target_rank_bytes))]
    return [
        ("target", f"{count(p.target_parameters)} parameters{part}, held in {p.target_dtype}"),
        ("drafter", f"{count(p.drafter_parameters)} parameters, {count(p.trained_parameters)} of them trained"),
        ("processes", f"{p.num_processes} that train"),
        ("step", f"{p.sequences_per_step} sequences, up to {p.anchors_per_step} anchors"),
        ("steps", unknown if p.steps is None else f"{p.steps:,}"),
        ("data", unknown if p.num_tokens is None else f"{p.num_samples:,} samples, {count(p.num_tokens)} tokens"),
        ("memory", f"about {size(p.memory_bytes)} a process"),
        ("  weights", size(p.weights_bytes)),
        ("  gradients, moments", size(p.optimizer_bytes)),
        ("  one micro-batch", size(p.batch_bytes)),
        *apart,
        ("disk", f"up to {size(p.disk_bytes)} (a state: {size(p.state_bytes)}; a drafter: {size(p.drafter_bytes)})"),
        ("reads", ", ".join(map(str, p.reads))),
        (
            "writes",
            ", ".join(map(str, (*p.writes, p.writes[0].parent / "states", p.writes[0].parent / "metrics.jsonl"))),
        ),
    ]


def report_rows(r: TrainReport) -> list[tuple[str, str]]:
    """What came of a run; figures are averages over its last logged steps."""
    rows = [("steps", f"{r.step:,} of {r.total_steps:,}, {duration(r.seconds)} this time")]
    for key, name in (("loss", "loss"), ("tau", "tau, teacher-forced"), ("tokens_per_second", "tokens/s")):
        if key in r.figures:
            rows.append((name, f"{r.figures[key]:.3g}"))
    if r.best.step:
        rows.append(("accepted length", f"{r.best.accepted_length:.3f} at step {r.best.step} (best/)"))
    rows.append(("drafter", str(r.out / ("best" if r.best.step else "last"))))
    return rows


def estimate_rows(e: CacheEstimate) -> list[tuple[str, str]]:
    """What a cache would take."""
    return [
        ("samples", f"{e.num_samples:,}"),
        ("tokens", f"{e.num_tokens:,}"),
        *((f"  {name}", size(part)) for name, part in e.parts.items()),
        ("bytes", f"{size(e.num_bytes)} ({e.num_bytes / e.num_tokens:,.0f} a token)"),
        ("shards", f"about {e.num_shards:,}"),
        ("time", f"{duration(e.seconds)} at {e.tokens_per_second:,.0f} tokens/s"),
    ]


def count(number: int) -> str:
    """12,345,678 -> 12.3 M."""
    for unit, name in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{2 if unit == 'GiB' else 1}f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"


def duration(seconds: float) -> str:
    """Seconds in the unit that people count them in."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
