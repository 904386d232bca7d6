"""Ragged verify rows: packed to the front, padded to a tier, scattered back.

Shape legend: B requests, T verify rows of the widest request, N real rows in all, P >= N packed rows.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from dspark.kernels.choice import kernels_for

# Up to each number of rows, counts are rounded up to this multiple: few shapes, and few rows that serve nobody.
_TIERS = ((8, 1), (64, 4), (128, 8), (512, 16), (2048, 64))
_COARSEST = 256


class PackedRows(NamedTuple):
    """Where each packed row comes from: request by request, rows in order; then rows that own no request."""

    requests: Int64[Tensor, " P"]  # 0 in rows that own no request
    offsets: Int64[Tensor, " P"]  # which row of its request, 0 is the anchor's
    num_real: int  # N

    @property
    def num_rows(self) -> int:
        """P."""
        return len(self.requests)

    def first(self, num_real: int) -> "PackedRows":
        """The first real rows alone: those of the first requests, where they end with one."""
        assert num_real <= self.num_real
        return PackedRows(self.requests[:num_real], self.offsets[:num_real], num_real)

    def among_first(self, lens: Int64[Tensor, " B"]) -> Bool[Tensor, " P"]:
        """Which packed rows are among the first `lens[b]` ones of their request."""
        real = torch.arange(self.num_rows, device=lens.device) < self.num_real
        return real & (self.offsets < lens[self.requests])

    def flat(self, width: int) -> Int64[Tensor, " N"]:
        """Index of each real row in a [B * width] table."""
        return (self.requests * width + self.offsets)[: self.num_real]


def row_tier(num_rows: int) -> int:
    """The number of rows that so many are padded to."""
    step = next((step for limit, step in _TIERS if num_rows <= limit), _COARSEST)
    return -(-num_rows // step) * step


def pack(lens: Int64[Tensor, " B"], pad_to: int = 0) -> PackedRows:
    """The first `lens[b]` rows of each request, one after the other, and pad rows up to `pad_to`."""
    num_real = int(lens.sum())
    if kernels := kernels_for(lens):
        requests, offsets = kernels.pack_rows(lens, max(num_real, pad_to))
        return PackedRows(requests, offsets, num_real)
    requests = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=num_real)
    first = lens.cumsum(0) - lens
    offsets = torch.arange(num_real, device=lens.device) - first[requests]
    if (padding := pad_to - num_real) > 0:
        requests, offsets = (torch.nn.functional.pad(column, (0, padding)) for column in (requests, offsets))
    return PackedRows(requests, offsets, num_real)


def scatter(packed: Shaped[Tensor, "P ..."], rows: PackedRows, batch_size: int, width: int) -> Tensor:
    """Packed rows back in their places, [B, width, *rest]; rows that did not run hold zeros."""
    places = rows.flat(width)
    if kernels := kernels_for(packed):
        out: Tensor = kernels.scatter_rows(packed, places, batch_size * width)
    else:
        out = packed.new_zeros(batch_size * width, *packed.shape[1:])
        out.index_copy_(0, places, packed[: rows.num_real])
    return out.view(batch_size, width, *packed.shape[1:])
