"""What `dspark profile` prints of the costs that it measured."""

import json
import sys

from rich.console import Console
from rich.table import Table

from dspark.engine.profile import Profiled, sizes


def show_costs(profiled: Profiled, as_json: bool = False) -> None:
    """Print, by requests decoded together, what rounds take and from which accepted length on drafts pay."""
    rows = [figures(profiled, size) for size in sizes(profiled.max_batch)]
    if as_json:
        sys.stdout.write(json.dumps({"file": str(profiled.path), "rounds": rows}) + "\n")
        return
    table = Table(title=f"Costs of rounds, {profiled.num_drafts} drafts", caption=f"written to {profiled.path}")
    for name in ("requests", "plain ms", "draft ms", "verify ms", "plain tokens/s", "pays from"):
        table.add_column(name, justify="right")
    for row in rows:
        milliseconds = (f"{1e3 * row[key]:.1f}" for key in ("plain_seconds", "draft_seconds", "verify_seconds"))
        rate, even = row["requests"] / row["plain_seconds"], row["break_even_accepted_length"]
        table.add_row(f"{row['requests']:.0f}", *milliseconds, f"{rate:.1f}", f"{even:.2f}")
    console = Console(highlight=False)
    console.print(table)
    console.print("pays from: the accepted length at which verifying whole blocks is as fast as plain decoding.")


def figures(profiled: Profiled, size: int) -> dict[str, float]:
    """Seconds of a batch's rounds: plain, drafting, and verifying whole blocks with all that follows."""
    plain, whole = profiled.seconds(size, size), profiled.seconds(size, size * (profiled.num_drafts + 1))
    draft = profiled.draft_seconds(size)
    return {
        "requests": size,
        "plain_seconds": plain,
        "draft_seconds": draft,
        "verify_seconds": whole - draft,
        "break_even_accepted_length": whole / plain,
    }
