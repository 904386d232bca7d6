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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dspark.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run, and the collectives that the trainer needs."""

    rank: int
    world_size: int  # of the trainers, which come first
    device: torch.device
    num_targets: int = 0  # processes behind them that run the target alone
    group: dist.ProcessGroup | None = None  # the trainers'; None: every process

    @property
    def runs_target(self) -> bool:
        """Whether this process makes states for trainers instead of training."""
        return self.rank >= self.world_size

    @property
    def target_rank(self) -> int:
        """The process that makes this trainer's states."""
        return self.world_size + self.rank % self.num_targets

    @property
    def trainers(self) -> list[int]:
        """The trainers that this process makes states for."""
        return [rank for rank in range(self.world_size) if rank % self.num_targets == self.rank - self.world_size]

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
        dist.all_reduce(summed, group=self.group)
        return float(summed)

    def gather(self, value: Any) -> list[Any]:
        """Every process's `value`, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.world_size > 1:
            dist.barrier(group=self.group)

    def shard(self, module: nn.Module) -> None:
        """Shard the module's parameters over the processes, in place; gradients become SUMS over them."""
        if self.world_size > 1:
            kind, group = self.device.type, self.group
            mesh = init_device_mesh(kind, (self.world_size,)) if group is None else DeviceMesh.from_group(group, kind)
            fully_shard(module, mesh=mesh)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            # gloo knows the plain sum only; a scaled reduction is for NCCL.
            module.set_force_sum_reduction_for_comms(True)

    def new_group(self) -> dist.ProcessGroup:
        """Another group of the trainers, on the CPU, whose collectives may run beside the others."""
        if self.group is None:
            group = dist.new_group(backend="gloo")
        else:
            ranks = list(range(self.world_size))
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

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
def join_ranks(device: str = "auto", num_targets: int = 0, timeout: timedelta | None = None) -> Iterator[Ranks]:
    """Join the other processes that torchrun started, or be a world of one; a group that is there already is used.

    `device`: "cpu", "cuda" or "auto" (cuda where there is one). The last `num_targets` processes run the target, the
    others train. `timeout` is how long a process waits for another (None: PyTorch's own). Raises ConfigError when the
    device is not there, or too few processes are.
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
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        trainers, group = dist.get_world_size() - num_targets, None
        if num_targets:
            if trainers < num_targets:
                raise ConfigError(
                    f"target_ranks: {num_targets} of {dist.get_world_size()} processes leave fewer trainers than that: "
                    "start more with torchrun, or lower it"
                )
            group = dist.new_group(list(range(trainers)))
        yield Ranks(dist.get_rank(), trainers, place, num_targets, group)
    finally:
        if ours:
            dist.destroy_process_group()
