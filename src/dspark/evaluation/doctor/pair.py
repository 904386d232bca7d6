"""The pair under examination: loaded once for training's forward and once for the engine, its files looked at first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.layouts.deepspec import StoredDrafter, open_drafter
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.pair import drafter_path
from dspark.errors import CheckpointError, ConfigError
from dspark.evaluation.doctor.report import Check, passed
from dspark.models.hub import resolve_model
from dspark.models.linear import pack_linears
from dspark.models.target import Target, load_target
from dspark.models.weights import parameters_digest

SHOWN = 5  # names in a sentence


@dataclass
class Pair:
    """A target and a drafter that is meant for it."""

    target: Target
    path: Path  # of the target's files
    drafter_path: Path
    trained: Drafter  # as stored: the side of training
    serving: Drafter  # prepared as the engine has it
    settings: EngineSettings
    provenance: dict[str, Any]  # what the drafter's files tell of their making
    digest_with_drafters_rope: str  # what the target's would be if its rope settings were the drafter's


def open_pair(options: ModelOptions) -> tuple[Pair | None, list[Check]]:
    """Load both models. The pair is None when a check failed that leaves nothing to run.

    Raises ConfigError and CheckpointError for what is no pair at all: a name that nothing is found under.
    """
    if options.tensor_parallel > 1:
        raise ConfigError("tensor_parallel: the doctor looks at whole models: set it to 1")
    if options.weights != "stored":
        raise ConfigError("weights: the doctor compares with transformers, which has the stored ones: set it to stored")
    path, files = resolve_model(options.target), drafter_path(options)
    if files is None:
        raise ConfigError(f"drafter {options.drafter}: pass --drafter DIRECTORY ({options.target} ships none)")
    try:
        target = load_target(options.target, options.dtype, pack=False)
    except CheckpointError as error:
        return None, [_unusable("target files", error)]
    checks = [passed("target files", f"{target.digest}, {dtype_name(target.decoder.dtype)}", {"digest": target.digest})]
    try:
        stored = open_drafter(files, target.decoder)
    except CheckpointError as error:
        return None, [*checks, _unusable("drafter files", error)]
    checks.append(_check_tensors(stored))
    if checks[-1].status == "failed":
        return None, checks
    serving = open_drafter(files, target.decoder).load()
    trained = stored.load().requires_grad_(False)
    config = target.config.replace(rope=trained.config.rope)
    digest = parameters_digest(target.decoder.named_parameters(), config.digest())
    pack_linears(target.decoder)
    settings = EngineSettings(num_draft_tokens=options.num_draft_tokens)
    return Pair(target, path, files, trained, serving.prepare(), settings, stored.provenance, digest), checks


def _unusable(name: str, error: CheckpointError) -> Check:
    change = "mend or replace these files as the finding says; nothing behind them can be looked at before"
    return Check(name, "failed", str(error), fault="unusable file", change=change)


def _check_tensors(stored: StoredDrafter) -> Check:
    """Names, shapes, dtypes and values of the drafter's tensors."""
    problems, name = stored.problems(), "drafter files"
    figures: dict[str, Any] = {**problems._asdict(), "num_tensors": len(stored.tensors)}
    if lines := problems.lines():
        kinds = f"{len(problems.missing)} missing, {len(problems.unexpected)} unexpected, {len(problems.misshapen)} "
        more = "" if len(lines) <= SHOWN else f" and {len(lines) - SHOWN} more"
        return Check(
            name,
            "failed",
            f"{kinds}of another shape: {', '.join(lines[:SHOWN])}{more}",
            figures,
            "missing tensor" if problems.missing else "damaged file",
            f"restore these tensors in {stored.directory}, or export the checkpoint again",
        )
    if broken := [name for name, value in stored.tensors.items() if not bool(torch.isfinite(value).all())]:
        finding = f"NaN or infinite values in {', '.join(broken[:SHOWN])}"
        change = "export the checkpoint again; float16 may have overflowed: use bfloat16 or float32"
        return Check(name, "failed", finding, figures | {"not_finite": broken}, "damaged file", change)
    untrained = [name for name, value in stored.tensors.items() if _is_untrained(value)]
    dtypes = sorted({dtype_name(value.dtype) for value in stored.tensors.values()})
    figures |= {"dtypes": dtypes, "untrained": untrained}
    finding = f"{len(stored.tensors)} tensors, {', '.join(dtypes)}"
    if untrained:
        finding += f"; as initialised, perhaps never trained: {', '.join(untrained[:SHOWN])}"
    return passed(name, finding, figures)


def _is_untrained(value: Tensor) -> bool:
    """All zeros, or a norm's ones: what bfloat16 without float32 masters leaves where steps are too small for it."""
    first = value.flatten()[0]
    return value.numel() > 1 and bool(first in (0, 1)) and bool((value == first).all())


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16."""
    return str(dtype).removeprefix("torch.")
