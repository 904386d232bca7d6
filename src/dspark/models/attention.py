"""Attention over the paged KV cache, in plain PyTorch; `flex` has the other way to read the cache.

Shapes: B requests, T rows a request in this forward, P packed rows, S keys of the longest context, Hq query heads,
Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dspark.models.flex import fits, paged_flex, paged_mask
from dspark.models.kv_cache import PagedKVCache
from dspark.spec.layout import PackedRows


@dataclass(frozen=True)
class AttentionBatch:
    """Where the rows of one forward stand, where their keys are stored, and which keys each row sees.

    Shared by all layers: masks are made at first use and kept.
    """

    positions: Tensor  # i64 [B, T], 0 in padding rows
    slots: Tensor  # i64 [B, T], where each row's key and value go; 0 in padding rows
    visible_end: Tensor  # i64 [B, T]: the row sees the keys at positions < visible_end
    num_keys: int  # S
    contiguous: tuple[int, int] | None  # (first slot, S): all keys lie in one run, read as a view
    kv_slots: Tensor | None  # i64 [B * S], the slots of positions 0..S-1 otherwise
    real_rows: Tensor | None  # i64 [N], flat indices into [B * T] of the rows that are not padding; None = all
    causal_from_zero: bool  # each request starts at position 0 and is causal, so T == S and no mask tensor is needed
    tables: Tensor  # i64 [B, K], the blocks that positions 0..S-1 lie in; 0 where a request has none
    is_static: bool = False  # laid out without reading a value back: S is fixed, and masks are made even for nothing
    _biases: dict[tuple[int | None, torch.dtype, int], Tensor | None] = field(default_factory=dict, repr=False)
    _masks: dict[int | None, BlockMask] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        positions: Tensor,
        query_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        visible_end: Tensor | None = None,
    ) -> Self:
        """Lay out a forward of B requests.

        positions: i64 [B, T]; request b has `query_lens[b]` real rows (at least 1), the rest is padding whose output
        is arbitrary and whose keys are not stored. `block_tables[b]` lists the request's pages and must reach every
        visible key. `visible_end` i64 [B, T] defaults to `positions + 1` (causal).
        """
        B, T = positions.shape
        device = positions.device
        causal = visible_end is None
        visible_end = positions + 1 if visible_end is None else visible_end
        real = None
        if min(query_lens) < T:
            real = torch.arange(T, device=device) < torch.tensor(query_lens, device=device)[:, None]  # [B, T]
            positions = torch.where(real, positions, 0)
            visible_end = torch.where(real, visible_end, 1)
        ends = visible_end.amax(dim=1)  # [B]
        last = ends.tolist()
        num_keys = max(last)
        num_pages = -(-num_keys // block_size)
        assert all(len(t) * block_size >= end for t, end in zip(block_tables, last, strict=True))

        pages = [list(table[:num_pages]) + [0] * (num_pages - len(table)) for table in block_tables]
        tables = torch.tensor(pages, device=device)  # [B, num_pages]
        first_slots = tables * block_size
        slots = first_slots.gather(1, positions // block_size) + positions % block_size
        if real is not None:
            slots = torch.where(real, slots, 0)
        contiguous, kv_slots = None, None
        if B == 1 and pages[0] == list(range(pages[0][0], pages[0][0] + num_pages)):
            contiguous = (pages[0][0] * block_size, num_keys)
        else:
            key = torch.arange(num_keys, device=device)
            kv_slots = first_slots[:, key // block_size] + key % block_size  # [B, S]
            kv_slots = torch.where(key < ends[:, None], kv_slots, 0).flatten()
        return cls(
            positions=positions,
            slots=slots,
            visible_end=visible_end,
            num_keys=num_keys,
            contiguous=contiguous,
            kv_slots=kv_slots,
            real_rows=None if real is None else real.flatten().nonzero().squeeze(1),
            causal_from_zero=causal and num_keys == T and not bool(positions[:, 0].any()),
            tables=tables,
        )

    def row(self, index: int) -> Self:
        """The same forward cut to one row of each request. What that row does not see is not read.

        Every row of the batch must be real.
        """
        assert self.real_rows is None
        visible_end = self.visible_end[:, index : index + 1]  # [B, 1]
        num_keys = self.num_keys if self.is_static else int(visible_end.max())
        kv_slots = self.kv_slots
        if kv_slots is not None:
            seen = torch.arange(num_keys, device=visible_end.device) < visible_end
            kv_slots = torch.where(seen, kv_slots.view(len(visible_end), -1)[:, :num_keys], 0).flatten()
        return replace(
            self,
            positions=self.positions[:, index : index + 1],
            slots=self.slots[:, index : index + 1],
            visible_end=visible_end,
            num_keys=num_keys,
            contiguous=None if self.contiguous is None else (self.contiguous[0], num_keys),
            kv_slots=kv_slots,
            causal_from_zero=False,
            _biases={},
            _masks={},
        )

    def write(self, cache: PagedKVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the rows' keys and values k, v [B, T, Hkv, D], padding left out."""
        k, v, slots = k.flatten(0, 1), v.flatten(0, 1), self.slots.flatten()
        if self.real_rows is not None:
            k, v, slots = k[self.real_rows], v[self.real_rows], slots[self.real_rows]
        cache.write(layer, slots, k, v)

    def read(self, cache: PagedKVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer at positions 0..S-1, each [B, S, Hkv, D]."""
        k, v = cache.layers[layer]
        if self.contiguous is not None:
            start, length = self.contiguous
            return k[start : start + length].unsqueeze(0), v[start : start + length].unsqueeze(0)
        assert self.kv_slots is not None
        shape = (self.positions.shape[0], self.num_keys, *k.shape[1:])
        return k.index_select(0, self.kv_slots).view(shape), v.index_select(0, self.kv_slots).view(shape)

    def bias(self, window: int | None, dtype: torch.dtype, repeats: int = 1) -> Tensor | None:
        """Return what is added to the scores, [B, 1, repeats * T, S] of 0 and -inf; None when every row sees every key.

        With a window w a row at position p sees the keys at positions > p - w only. The T rows stand `repeats` times.
        """
        if (window, dtype, repeats) not in self._biases:
            key = torch.arange(self.num_keys, device=self.positions.device)
            seen = key < self.visible_end[..., None]  # [B, T, S]
            if window is not None:
                seen &= key > self.positions[..., None] - window
            bias = None
            if self.is_static or not bool(seen.all()):
                bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                bias = bias.masked_fill_(~seen, float("-inf")).repeat(1, repeats, 1).unsqueeze(1)
            self._biases[window, dtype, repeats] = bias
        return self._biases[window, dtype, repeats]

    def mask(self, window: int | None, cache: PagedKVCache) -> BlockMask:
        """What `bias` says, over the whole cache where it lies."""
        if window not in self._masks:
            self._masks[window] = paged_mask(
                self.tables, self.positions, self.visible_end, window, cache.num_blocks, cache.block_size
            )
        return self._masks[window]


@dataclass(frozen=True)
class PackedBatch:
    """A ragged forward of B requests in one line of P rows: only the scores are made in the padded shape [B, T].

    All else of the network sees [1, P, ...]. Rows that own no request compute something finite that nobody reads.
    """

    dense: AttentionBatch
    positions: Tensor  # i64 [1, P], 0 in rows that own no request
    slots: Tensor  # i64 [1, P], likewise
    num_real: int
    places: Tensor  # i64 [P], each row's place in [B * T]; 0 in rows that own no request
    rows: Tensor  # i64 [B * T], the row that stands in each place; 0 where none does

    @classmethod
    def build(cls, dense: AttentionBatch, packed: PackedRows) -> Self:
        """Pack the real rows of a batch."""
        B, T = dense.positions.shape
        flat = packed.flat(T)
        places = F.pad(flat, (0, packed.num_rows - packed.num_real))
        rows = torch.zeros(B * T, dtype=torch.long, device=flat.device)
        rows[flat] = torch.arange(packed.num_real, device=flat.device)
        real = torch.arange(packed.num_rows, device=flat.device) < packed.num_real
        positions, slots = (torch.where(real, of.flatten()[places], 0)[None] for of in (dense.positions, dense.slots))
        return cls(dense, positions, slots, packed.num_real, places, rows)

    def write(self, cache: PagedKVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the rows' keys and values k, v [1, P, Hkv, D], those that own no request left out."""
        real = slice(self.num_real)
        cache.write(layer, self.slots[0, real], k[0, real], v[0, real])

    def spread(self, rows: Tensor) -> Tensor:
        """[1, P, ...] -> [B, T, ...]; places without a row repeat some row."""
        return rows[0].index_select(0, self.rows).view(*self.dense.positions.shape, *rows.shape[2:])

    def collect(self, places: Tensor) -> Tensor:
        """[B, T, ...] -> [1, P, ...]."""
        return places.flatten(0, 1).index_select(0, self.places)[None]


def paged_attention(
    q: Tensor,
    layer: int,
    cache: PagedKVCache,
    batch: AttentionBatch | PackedBatch,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend from q [B, T, Hq, D] (or packed, [1, P, Hq, D]) to the keys stored in the cache; returns the same shape.

    The rows' own keys must have been written. Query head h reads key/value head h // (Hq / Hkv). `scale` multiplies the
    scores; None is D ** -0.5.
    """
    if isinstance(batch, PackedBatch):
        return batch.collect(paged_attention(batch.spread(q), layer, cache, batch.dense, window, scale))
    B, T, Hq, D = q.shape
    if cache.attention == "flex" and fits(D, cache.block_size, q.device):
        return paged_flex(q, *cache.layers[layer], batch.mask(window, cache), scale)
    k, v = batch.read(cache, layer)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, Hkv, S, D]
    Hkv = k.shape[1]
    if batch.causal_from_zero and (window is None or window >= batch.num_keys):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=Hq != Hkv)
        return out.transpose(1, 2)
    # Query heads that share a key/value head become rows of it: its keys are read once, not once a query head.
    share = Hq // Hkv
    grouped = q.view(B, T, Hkv, share, D).permute(0, 2, 3, 1, 4).reshape(B, Hkv, share * T, D)
    bias = batch.bias(window, q.dtype, 1 if T == 1 else share)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scale)
    return out.view(B, Hkv, share, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, Hq, D)
