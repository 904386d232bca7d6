"""Attention that reads the paged cache where it lies: flex attention over the blocks that the tables list.

`models.attention` gathers keys and values of all requests into one tensor first. Here a block mask names the physical
blocks of each request, and every key that the kernel meets is translated back to its position.

A key that is masked is still multiplied, by zero, so what a table lists must be finite: the blocks of a request that
broke are wiped before others get them. Where nothing is compiled, as on the CPU, that holds of the whole cache: there
flex attention is for comparison.

Shapes: B requests, T rows a request, K blocks of a table, N blocks of the cache, Hq query heads, Hkv key/value heads, D
head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

LEAST = 16  # rows, keys and head components that one step of the kernel multiplies
WIDE_TILE = 64  # rows of one tile where there are more than a few


def fits(head_dim: int, block_size: int, device: torch.device) -> bool:
    """Whether the kernel takes these sizes; where there is no kernel, as on the CPU, any will do."""
    if device.type != "cuda":
        return True
    return all(size >= LEAST and size & (size - 1) == 0 for size in (head_dim, block_size))


def paged_mask(
    tables: Tensor, positions: Tensor, visible_end: Tensor, window: int | None, num_blocks: int, block_size: int
) -> BlockMask:
    """The mask of rows [B, T] over the whole cache of N = `num_blocks` blocks, tables i64 [B, K].

    A row sees its request's keys at positions < visible_end and, with a window w, > its own - w. Block 0 in a table
    stands for none. Nothing is read back from the device.
    """
    B, T = positions.shape
    logical = tables.new_full((B, num_blocks), -1)
    logical.scatter_(1, tables, torch.arange(tables.shape[1], device=tables.device).expand_as(tables))
    logical[:, 0] = -1

    def seen(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        block = logical[b, slot // block_size]
        position = block * block_size + slot % block_size
        visible = (block >= 0) & (position < visible_end[b, row])
        return visible if window is None else visible & (position > positions[b, row] - window)

    tile = LEAST if T <= LEAST else WIDE_TILE
    num_tiles = -(-T // tile)
    used = (visible_end.amax(dim=1) + block_size - 1) // block_size  # i64 [B]
    mask: BlockMask = BlockMask.from_kv_blocks(
        used[:, None, None].expand(B, 1, num_tiles).to(torch.int32).contiguous(),
        tables[:, None, None].expand(B, 1, num_tiles, -1).to(torch.int32).contiguous(),
        BLOCK_SIZE=(tile, block_size),
        mask_mod=seen,
        seq_lengths=(T, num_blocks * block_size),
        compute_q_blocks=False,  # for gradients alone
    )
    return mask


def paged_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Attend from q [B, T, Hq, D] to the stored k and v [slots, Hkv, D] that the mask lets through; like q."""
    rows, tile, block_size = q.transpose(1, 2), *mask.BLOCK_SIZE
    keys, values = (stored.transpose(0, 1)[None] for stored in (k, v))  # [1, Hkv, slots, D]: a view
    options: Any = None
    run: Callable[..., Tensor] = flex_attention
    if q.is_cuda:
        # A step of the kernel may not be larger than a tile of the mask.
        options = {"BLOCK_M": tile, "BLOCK_N": min(block_size, 128), "FORCE_USE_FLEX_ATTENTION": True}
        run = _compiled(flex_attention)
    gqa = q.shape[2] != k.shape[1]
    out = run(rows, keys, values, block_mask=mask, scale=scale, enable_gqa=gqa, kernel_options=options)
    return out.transpose(1, 2)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
