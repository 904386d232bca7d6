"""Processes of one training run, as torchrun starts them, with a fault in one of them: for tests."""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from dspark import stages
from dspark.errors import DsparkError
from dspark.training.config import TrainSettings
from dspark.training.trainer import Trainer

FAULT_STEP = 2


def start(world_size: int, settings: TrainSettings, faults: dict[int, str] | None = None) -> list[BaseProcess]:
    """Start the processes of a run; `faults`: by rank "raise", "kill" or "bad states" at step 2."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dspark.stages"])  # its imports take seconds: once for all
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
        fault = (faults or {}).get(rank, "")
        processes.append(context.Process(target=_run, args=(place, settings.model_dump(), fault), daemon=True))
        processes[-1].start()
    return processes


def join(processes: list[BaseProcess], seconds: float) -> list[int | None]:
    """Exit codes, by rank; None of one that has not ended in time, which is ended here."""
    codes: list[int | None] = []
    for process in processes:
        process.join(seconds)
        codes.append(process.exitcode)
        process.kill()
    return codes


def _run(place: dict[str, Any], settings: dict[str, Any], fault: str) -> None:
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    recipe = TrainSettings.from_dict(settings, "test")
    recipe.out.mkdir(parents=True, exist_ok=True)
    load_step = Trainer.load_step

    def faulty(trainer: Trainer, step: int) -> Any:
        if step == FAULT_STEP:
            _fail(fault)
        return load_step(trainer, step)

    Trainer.load_step = faulty  # type: ignore[method-assign]
    if fault.startswith("target"):
        stages.streamed_samples = _short_lived(stages.streamed_samples, fault.removeprefix("target "))
    try:
        stages.train(recipe)
    except DsparkError as error:
        (recipe.out / f"error-{place['RANK']}").write_text(str(error))
        sys.exit(2)


def _fail(fault: str) -> None:
    if fault == "raise":
        raise DsparkError("out of luck")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def _short_lived(make: Callable[..., Any], fault: str) -> Callable[..., Any]:
    """Samples whose fourth request meets the fault."""

    def made(*arguments: Any) -> Any:
        samples, count = make(*arguments), 0
        load = samples.load

        def counted(indices: Any) -> Any:
            nonlocal count
            count += 1
            if count == 4:
                _fail(fault)
                samples._capture._source._decoder.layers[0].mlp.down_proj.weight.fill_(float("nan"))
            return load(indices)

        samples.load = counted
        return samples

    return made


def wait_for(path: Path, lines: int, processes: list[BaseProcess]) -> None:
    """Return when the file has so many lines; a process that ends before is an error."""
    while not path.exists() or path.read_text().count("\n") < lines:
        assert all(process.exitcode is None for process in processes)
        processes[0].join(0.05)
