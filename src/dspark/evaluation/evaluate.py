"""`dspark eval` and `dspark compare`: measure, then report."""

from __future__ import annotations

import hashlib
import os
import platform
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dspark import __version__
from dspark.engine.config import ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import drafter_path, open_engine
from dspark.errors import ConfigError
from dspark.evaluation import report
from dspark.evaluation.compare import compare as compare_runs
from dspark.evaluation.config import CompareOptions, EvalOptions, MeasureOptions
from dspark.evaluation.results import Run, is_run, read_run, short_names, write_about
from dspark.evaluation.rows import Setting, make_cases
from dspark.evaluation.runner import run
from dspark.evaluation.tasks import Task, load_tasks
from dspark.files import sha256_file
from dspark.log import get_logger
from dspark.training.parallel import Ranks, join_ranks

_log = get_logger(__name__)

PATIENCE = timedelta(days=2)  # processes wait for the slowest one


def evaluate(options: EvalOptions) -> None:
    """Measure a drafter and write and print its report. Under torchrun the processes share the prompts."""
    with join_ranks(options.measure.device, timeout=PATIENCE) as ranks:
        found = measure(options, ranks)
        if ranks.is_main:
            report.give(options.out, "report", [found], [], options.report)


def compare(options: CompareOptions) -> None:
    """Set runs side by side, measuring first those that are given as drafters; write and print the comparison.

    Raises `ConfigError`, and `DataError` for runs that cannot be compared.
    """
    if len(options.runs) < 2 or options.model.drafter != "auto":
        raise ConfigError("compare: name two runs or drafters as arguments: dspark compare FIRST SECOND --out DIR")
    names = short_names(options.runs)
    with join_ranks(options.measure.device, timeout=PATIENCE) as ranks:
        runs = [_run(options, path, name, ranks) for path, name in zip(options.runs, names, strict=True)]
        if ranks.is_main:
            comparisons = [compare_runs(runs[0], other) for other in runs[1:]]
            report.give(options.out, "compare", runs, comparisons, options.report)


def _run(options: CompareOptions, path: Path, name: str, ranks: Ranks) -> Run:
    if is_run(path):
        return read_run(path, name)
    model = options.model.replace(drafter=str(path))
    out = options.out / name.replace("/", "-")
    fields = {"out": out, "measure": options.measure, "model": model}
    return measure(EvalOptions.from_dict(fields, "compare"), ranks, name)


def measure(options: EvalOptions, ranks: Ranks, name: str | None = None) -> Run:
    """Answer the task sets, going on where an earlier run into the same directory stopped. Raises `ConfigError`."""
    if drafter_path(options.model) is None:
        raise ConfigError("eval measures a drafter: pass --drafter PATH (this target ships none)")
    tasks = open_tasks(options.measure, ranks)
    engine = open_engine(options.model, options.measure.engine_settings(), ranks.device)
    settings = [Setting(t, mode) for t in options.measure.temperatures for mode in thinking_modes(engine, options)]
    stamp, about = stamp_of(engine, options, ranks), about_of(engine, options, ranks)
    if ranks.is_main:
        write_about(options.out, about)
    try:
        rows = run(engine, make_cases(tasks, settings), options.measure, options.out, stamp, ranks)
    except KeyboardInterrupt:
        _log.warning("stopped: what is done is kept in %s, and the same command goes on", options.out)
        raise
    return Run(name or options.out.resolve().name, rows, stamp, about)


def open_tasks(options: MeasureOptions, ranks: Ranks) -> list[Task]:
    """The task sets; the main process fetches what is missing while the others wait."""
    if ranks.is_main:
        load_tasks(options.tasks, options.data, options.prompts)
    ranks.wait()
    return load_tasks(options.tasks, options.data, options.prompts)


def thinking_modes(engine: Engine, options: EvalOptions) -> list[bool | None]:
    """The modes to measure. Raises `ConfigError` where the target's chat template has none."""
    if options.measure.thinking == "default":
        return [None]
    if "enable_thinking" not in str(engine.target.tokenizer.chat_template or ""):
        raise ConfigError(f"thinking: the chat template of {options.model.target} has no such mode: leave it out")
    modes: dict[str, list[bool | None]] = {"on": [True], "off": [False], "both": [True, False]}
    return modes[options.measure.thinking]


def stamp_of(engine: Engine, options: EvalOptions, ranks: Ranks) -> dict[str, Any]:
    """What decides the rows. Threads and processes may change: they touch times alone."""
    return {
        "target_digest": engine.target.digest,
        "chat_template_digest": engine.target.chat_template_digest,
        "drafter_digest": drafter_digest(options.model),
        "dtype": str(engine.target.decoder.dtype),
        "device": ranks.device.type,
        "num_draft_tokens": options.model.num_draft_tokens,
        **options.measure.model_dump(mode="json", include={"tokens", "batch", "max_length", "seed"}),
    }


def drafter_digest(options: ModelOptions) -> str:
    """16 hex digits that identify the drafter's files."""
    path = drafter_path(options)
    assert path is not None
    files = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin") or p.name == "config.json")
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()[:16]


def about_of(engine: Engine, options: EvalOptions, ranks: Ranks) -> dict[str, Any]:
    """What a reader wants to know of the pair and the machine."""
    assert engine.drafter is not None
    config = engine.drafter.config
    return {
        "target": options.model.target,
        "drafter": options.model.drafter,
        "algorithm": config.algorithm,
        "drafts a round": min(config.num_drafts, options.model.num_draft_tokens or config.num_drafts),
        "dtype": str(engine.target.decoder.dtype).removeprefix("torch."),
        "device": device_name(ranks.device),
        "processes": ranks.world_size,
        "threads": torch.get_num_threads(),
        "batch": options.measure.batch,
        "new tokens": options.measure.tokens,
        "seed": options.measure.seed,
        "versions": f"dspark {__version__}, PyTorch {torch.__version__}",
    }


def device_name(device: torch.device) -> str:
    """What computed, as a person names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
