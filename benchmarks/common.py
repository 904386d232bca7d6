"""What the benchmarks share: prompts, engines, samples, and the arguments that most of them take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark.console.session import Session, open_session
from dspark.engine.config import ModelOptions

HERE = Path(__file__).parent
SHARED_SETS = HERE.parent.parent / "shared" / "data" / "eval"
ALL_SETS = ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "lbpp", "livecodebench", "mt-bench", "arena-hard-v2")
SETS = ("humaneval", "gsm8k", "mt-bench")


class Samples(list[Any]):
    """Training samples in memory, as the trainer reads them; each has token_ids."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each."""
        return np.array([len(sample.token_ids) for sample in self])

    def row(self, index: int) -> Any:
        """One sample; it needs no loading."""
        return self[index]

    def load(self, indices: Sequence[int]) -> list[Any]:
        """Some samples, in the order asked for."""
        return [self[index] for index in indices]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's text, with the models and `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """What answers are timed, and how many."""
    parser.add_argument("--data", type=Path, help="directory with SET.jsonl files; default: built-in prompts")
    parser.add_argument("--prompts", type=int, default=8, help="per set")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="1 prompt a set, 16 tokens")


def models_of(args: argparse.Namespace) -> ModelOptions:
    """The models that the command line names."""
    return ModelOptions.from_dict({"target": args.target, "drafter": args.drafter, "dtype": args.dtype}, "options")


def tell(result: Mapping[str, object], as_json: bool) -> None:
    """One JSON object, or a line for each figure."""
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:26} {value:.4g}" if isinstance(value, float) else f"{key:26} {value}")


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
