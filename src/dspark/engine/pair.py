"""An engine from names: the target, the drafter that goes with it, both loaded."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

from dspark.drafters.base import Drafter
from dspark.drafters.layouts.calibration import CALIBRATION_NAME, Calibration
from dspark.drafters.layouts.deepspec import read_drafter
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.parallel import DIVIDED_GRAPHS, divide, join, lead_or_follow
from dspark.errors import CheckpointError, ConfigError
from dspark.log import get_logger
from dspark.models.target import load_target

_log = get_logger(__name__)

SHIPPED_DRAFTERS = {"smollm2-135m": "smollm2-135m-dspark"}


def open_engine(options: ModelOptions, settings: EngineSettings, device: torch.device | str = "cpu") -> Engine:
    """Load target and drafter as the options say. Raises CheckpointError naming what does not fit.

    With `tensor_parallel` the processes share them, and all but the first stay in here: they leave the program when the
    first one does. Raises ConfigError when the models cannot be divided so.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    device, shards = torch.device(device), None
    if options.tensor_parallel > 1:
        if settings.graphs == "on":
            raise ConfigError(DIVIDED_GRAPHS)
        shards = join(options.tensor_parallel, device)
        device = shards.device
    if options.weights != "stored" and device.type != "cpu":
        raise ConfigError(f"weights {options.weights} run on the CPU only, not on {device}: set weights to stored")
    pack = device.type == "cpu" and shards is None
    target = load_target(options.target, options.dtype, pack=pack, weights=options.weights)
    target.decoder.to(device)
    path = drafter_path(options)
    drafter = (
        None if path is None else read_drafter(path, target.decoder, target.stored_digest or target.digest).to(device)
    )
    if options.num_draft_tokens is not None:
        settings = settings.replace(num_draft_tokens=options.num_draft_tokens)
    if path is not None and drafter is not None:
        drafter.prepare(pack=shards is None)
        if target.stored_digest is not None:
            _log.warning(
                "drafter %s was made for this target's stored weights, not for %s: answers follow the %s target, but "
                "fewer drafts may be accepted, and a calibration may fit less well",
                path, options.weights, options.weights,
            )  # fmt: skip
        if settings.planner != "static":
            settings = calibrated(settings, path, drafter)
    line = None
    if shards is not None:
        divide(target.decoder, drafter, shards)
        line = lead_or_follow(target.decoder, drafter, shards)
    return Engine(target, drafter, settings, line)


def calibrated(settings: EngineSettings, path: Path, drafter: Drafter) -> EngineSettings:
    """The settings with the temperatures of the calibration beside a drafter, if there is one and they name none.

    Raises CheckpointError for a calibration of another drafter.
    """
    file = path / CALIBRATION_NAME
    if settings.confidence_temperatures is not None or not file.is_file():
        return settings
    return settings.replace(confidence_temperatures=Calibration.read(file, drafter).temperatures)


def drafter_path(options: ModelOptions) -> Path | None:
    """Where the drafter's files are, or None for plain decoding."""
    if options.drafter == "none":
        return None
    if options.drafter != "auto":
        path = Path(options.drafter)
        if not path.is_dir():
            raise CheckpointError(f"drafter {path}: no such directory; give a drafter checkpoint, auto or none")
        return path
    name = SHIPPED_DRAFTERS.get(options.target)
    if name is None:
        return None
    path = Path(str(resources.files("dspark") / "assets" / name))
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: the shipped drafter is missing; reinstall dspark or pass --drafter none")
    return path
