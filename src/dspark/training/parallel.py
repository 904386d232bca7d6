"""The processes of one run: who this one is, what of a step is its own, how sums and parameters come together.

One process is a world of one, so there is a single path. Under torchrun the optimizer's state and the gradients are
sharded (FSDP2); which samples a step sees depends on neither the rank nor the number of ranks.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dspark.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run, and the collectives that the trainer needs."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes the logs and the servable checkpoints."""
        return self.rank == 0

    def share(self, accumulation: int) -> range:
        """The micro-batches of an optimizer step that this process runs."""
        return range(self.rank, accumulation, self.world_size)

    def check(self, accumulation: int) -> None:
        """Raise ConfigError where a step cannot be dealt out evenly."""
        if accumulation % self.world_size:
            raise ConfigError(
                f"accumulation {accumulation} is not a multiple of the {self.world_size} processes: it counts the "
                f"micro-batches of a step over all of them; set it to {self.world_size} or a multiple"
            )

    def total(self, value: float) -> float:
        """The sum of `value` over the processes."""
        if self.world_size == 1:
            return value
        summed = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(summed)
        return float(summed)

    def gather(self, value: Any) -> list[Any]:
        """Every process's `value`, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.world_size > 1:
            dist.barrier()

    def shard(self, module: nn.Module) -> None:
        """Shard the module's parameters over the processes, in place; gradients become SUMS over them."""
        if self.world_size > 1:
            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.world_size,)))
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            # gloo knows the plain sum only; a scaled reduction is for NCCL.
            module.set_force_sum_reduction_for_comms(True)

    def sync_gradients(self, module: nn.Module, last: bool) -> None:
        """Whether the next backward exchanges gradients: once a step, at its last micro-batch."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """While open, the module's parameters are whole tensors on every process."""
        if not isinstance(module, FSDPModule):
            yield
            return
        module.unshard()
        try:
            yield
        finally:
            module.reshard()


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """A tensor that may be sharded or partly summed, whole."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held so far: on the accelerator, or on the CPU all that was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def join_ranks(device: str = "auto") -> Iterator[Ranks]:
    """Join the other processes that torchrun started, or be a world of one; a group that is there already is used.

    `device`: "cpu", "cuda" or "auto" (cuda where there is one). Raises ConfigError when it is not there.
    """
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device is "cuda", but PyTorch finds none: set it to "cpu" or install a CUDA build')
    place = torch.device(kind)
    if kind == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    ours = not dist.is_initialized()
    if ours:
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), place)
    finally:
        if ours:
            dist.destroy_process_group()
