"""One engine over several processes: the first one schedules, plans, samples and serves; all run the networks.

Before the first process runs a network it tells the others, which make the same call on their shares. So what depends
on times, on requests that come and go, or on the last bit of a logit is decided in one place, and widths never differ.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.sharding import shard_drafter
from dspark.engine.calls import Line
from dspark.engine.config import EngineSettings
from dspark.engine.graphs import RecordedRunner, records
from dspark.engine.runner import Runner
from dspark.errors import ConfigError
from dspark.models.attention import AttentionBatch, PackedBatch
from dspark.models.decoder import Decoder, DecoderOutput
from dspark.models.linear import pack_linears
from dspark.models.sharding import Shards, shard_decoder
from dspark.spec.types import DraftBlock, SamplingRows

DIVIDED_GRAPHS = "graphs on records the rounds of one process: set graphs to off, or tensor_parallel to 1"


class LeadRunner(Runner):
    """The first process's runner."""

    def __init__(
        self, line: Line, decoder: Decoder, drafter: Drafter | None, settings: EngineSettings, num_blocks: int
    ) -> None:
        self._line, self._number = line, line.num_engines
        line.num_engines += 1
        with line.call(self._number, "open", settings, num_blocks, drafter is not None):
            super().__init__(decoder, drafter, settings, num_blocks)

    def run(self, token_ids: Tensor, batch: AttentionBatch | PackedBatch, taps: tuple[int, ...]) -> DecoderOutput:
        """See `Runner.run`."""
        with self._line.call(self._number, "run", token_ids, batch, taps):
            return super().run(token_ids, batch, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Runner.logits`."""
        with self._line.call(self._number, "logits", hidden):
            return super().logits(hidden)

    def propose(
        self, anchors: Tensor, batch: AttentionBatch, rows: SamplingRows | None, positions: Tensor
    ) -> DraftBlock:
        """See `Runner.propose`."""
        with self._line.call(self._number, "propose", anchors, batch, rows, positions):
            return super().propose(anchors, batch, rows, positions)

    def write_context(self, features: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor) -> None:
        """See `Runner.write_context`."""
        with self._line.call(self._number, "write_context", features, next_ids, positions, slots):
            super().write_context(features, next_ids, positions, slots)

    def wipe(self, blocks: list[int]) -> None:
        """See `Runner.wipe`."""
        with self._line.call(self._number, "wipe", blocks):
            super().wipe(blocks)


def make_runner(
    line: Line | None, decoder: Decoder, drafter: Drafter | None, settings: EngineSettings, num_blocks: int
) -> Runner:
    """A runner of models that this process has whole, or of those that it shares over `line`.

    Raises ConfigError where `graphs` is on and rounds can not be recorded.
    """
    networks = (decoder, drafter, settings, num_blocks)
    if line is not None:
        if settings.graphs == "on":
            raise ConfigError(DIVIDED_GRAPHS)
        return LeadRunner(line, *networks)
    return RecordedRunner(*networks) if records(settings, decoder) else Runner(*networks)


@torch.inference_mode()
def follow(line: Line, decoder: Decoder, drafter: Drafter | None) -> None:
    """The other processes: make the calls that the first one tells, until it closes the line.

    The outputs of the target's head and of the drafter are the first one's to use.
    """
    runners: dict[int, Runner] = {}
    for number, name, *arguments in line.calls():
        if name == "open":
            settings, num_blocks, drafts = arguments
            runners[number] = Runner(decoder, drafter if drafts else None, settings, num_blocks)
        else:
            _run(runners[number], name, arguments)


def _run(runner: Runner, name: str, arguments: list[Any]) -> None:
    match name:
        case "run":
            runner.run(*arguments)
        case "logits":
            runner.logits(*arguments)
        case "propose":
            runner.propose(*arguments)
        case "write_context":
            runner.write_context(*arguments)
        case "wipe":
            runner.wipe(*arguments)
        case _:
            raise AssertionError(name)


def join(tensor_parallel: int, device: torch.device) -> Shards:
    """Join the processes that torchrun started, as many as `tensor_parallel` says.

    Raises ConfigError when there are not so many, or when the command shares its work among them in its own way.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel}, but here every process has models of its own: set it to 1"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != tensor_parallel:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel}, but {started} process{' was' if started == 1 else 'es were'} "
            f"started: run torchrun --nproc-per-node {tensor_parallel} -m dspark …"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Shards(dist.get_rank(), tensor_parallel, device)


def divide(decoder: Decoder, drafter: Drafter | None, shards: Shards) -> None:
    """Keep this process's share of both, not packed so far, in place; on the CPU they are packed then.

    Raises ConfigError naming the field of either that the number of processes does not divide.
    """
    shard_decoder(decoder, shards)
    if drafter is not None:
        shard_drafter(drafter, shards)
    if shards.device.type == "cpu":
        pack_linears(decoder)
        if drafter is not None:
            drafter.pack()


def lead_or_follow(decoder: Decoder, drafter: Drafter | None, shards: Shards) -> Line:
    """The line for the first process's engines, closed when it ends. The others stay in here and leave the program."""
    line = Line(shards)
    if shards.rank:
        follow(line, decoder, drafter)
        leave()
    atexit.register(dist.destroy_process_group)
    atexit.register(line.close)  # runs before
    return line


def leave() -> NoReturn:
    """End a process that followed."""
    dist.destroy_process_group()
    sys.exit(0)
