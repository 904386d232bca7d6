"""What the first of several processes tells the others to run: any value, tensors inside it included.

Small tensors travel in the message, through the CPU; large ones of floating point follow it from device to device.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dspark.models.sharding import Shards

LARGE = 1 << 10  # numbers
FIRST_BYTES, LENGTH_BYTES = 1 << 13, 8  # of the first broadcast of a message, its length in front; most need no second
PATIENCE = timedelta(days=30)  # how long the others wait for a call: as long as a user may be silent


class Line:
    """From the first process to the others. Every process makes one, and they meet at the site `call`."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.num_engines = 0  # numbered in the order they were opened
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._is_open, self._under_way = True, False

    @contextmanager
    def call(self, *message: Any) -> Iterator[None]:
        """Tell the others; inside, make the same call here. A call that fails here leaves them without an end."""
        assert self._is_open, "the line is closed: the other processes have left"
        self._under_way = self.shards.together = True
        self._send(message)
        yield
        self._under_way = self.shards.together = False

    def close(self) -> None:
        """Let the others go, once. Where a call failed half-way they hang in it, and whoever started them ends them."""
        if self._is_open and not self._under_way:
            with self.call():
                pass
        self._is_open = False

    def calls(self) -> Iterator[Any]:
        """The other processes' end: what the first one tells, until it closes the line."""
        self.shards.together = True
        while message := self._receive():
            yield message

    def _send(self, message: Any) -> None:
        packer = _Packer(file := io.BytesIO())
        packer.dump(message)
        data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        first[:LENGTH_BYTES] = torch.tensor([len(data)]).view(torch.uint8)
        room = FIRST_BYTES - LENGTH_BYTES
        first[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data[:room]
        with self.shards.at("call"):
            dist.broadcast(first, src=0, group=self._group)
            if len(data) > room:
                dist.broadcast(data[room:], src=0, group=self._group)
        for tensor in packer.large:
            self.shards.agree(tensor.contiguous(), "states")

    def _receive(self) -> Any:
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        with self.shards.at("call"):
            dist.broadcast(first, src=0, group=self._group)
            size, data = int(first[:LENGTH_BYTES].view(torch.int64)), first[LENGTH_BYTES:]
            if size > len(data):
                rest = torch.empty(size - len(data), dtype=torch.uint8)
                dist.broadcast(rest, src=0, group=self._group)
                data = torch.cat([data, rest])
        unpacker = _Unpacker(io.BytesIO(data.numpy().tobytes()), self.shards.device)
        message = unpacker.load()
        for tensor in unpacker.large:
            self.shards.agree(tensor, "states")
        return message


class _Packer(pickle.Pickler):
    """Pickles all but tensors itself."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.large: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        """What stands for a tensor: its bytes, or only its shape."""
        if not isinstance(obj, Tensor):
            return None
        shape = tuple(obj.shape)
        if obj.is_floating_point() and obj.numel() >= LARGE:
            self.large.append(obj)
            return shape, obj.dtype, None
        return shape, obj.dtype, obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class _Unpacker(pickle.Unpickler):
    """The other end: tensors come to life on `device`, large ones empty."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.large: list[Tensor] = []
        self._device = device

    def persistent_load(self, pid: Any) -> Tensor:
        """The tensor that `_Packer.persistent_id` described."""
        shape, dtype, data = pid
        if data is None:
            self.large.append(torch.empty(shape, dtype=dtype, device=self._device))
            return self.large[-1]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(shape).to(self._device)
