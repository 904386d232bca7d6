"""What the benchmarks share: prompts, engines and timed answers."""

from __future__ import annotations

import json
from pathlib import Path

from dspark.console.session import Session, open_session
from dspark.engine.config import ModelOptions

HERE = Path(__file__).parent
SHARED_SETS = HERE.parent.parent / "shared" / "data" / "eval"
ALL_SETS = ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "lbpp", "livecodebench", "mt-bench", "arena-hard-v2")
SETS = ("humaneval", "gsm8k", "mt-bench")


def read_prompts(directory: Path | None, sets: tuple[str, ...], count: int) -> dict[str, list[str]]:
    """First user turns by set, `count` of each: from `directory/SET.jsonl`, else from the file beside this one."""
    directory = directory or (SHARED_SETS if SHARED_SETS.is_dir() else None)
    if directory is not None:
        files = {name: (directory / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in sets}
        return {name: [json.loads(line)["turns"][0] for line in lines[:count]] for name, lines in files.items()}
    own: dict[str, list[str]] = {}
    for line in (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        own.setdefault(row["set"], []).append(row["turns"][0])
    return {name: prompts[:count] for name, prompts in own.items()}


def open_pair(target_name: str, drafter_name: str, dtype: str, max_batch: int = 1) -> Session:
    """A session on the target in `dtype` with the drafter that the command line would take.

    Without a prefix cache: a prompt that is answered twice costs the same both times.
    """
    chosen = {"target": target_name, "drafter": drafter_name, "dtype": dtype}
    session = open_session(ModelOptions.from_dict(chosen, "options"), max_batch, prefix_cache=False)
    assert session.speculates, "a benchmark of speculation needs a drafter"
    return session
