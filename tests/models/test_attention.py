"""Paged attention against a plain softmax over the keys each row may see."""

import math

import pytest
import torch
from torch import Tensor

from dspark.models.attention import AttentionBatch, PackedBatch, paged_attention
from dspark.models.kv_cache import PagedKVCache
from dspark.spec.layout import pack

BLOCK, KV_HEADS, HEADS, DIM = 4, 2, 6, 8


def fill(cache: PagedKVCache, table: list[int], length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Write random keys and values of positions 0..length-1 and return them."""
    k, v = (torch.randn(length, KV_HEADS, DIM, generator=generator) for _ in range(2))
    slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])
    cache.write(0, slots, k, v)
    return k, v


def naive(q: Tensor, k: Tensor, v: Tensor, first: int, end: int) -> Tensor:
    """Attend from one row q [Hq, D] to the keys first..end-1."""
    k, v = (x[first:end].repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,shd->hs", q, k) / math.sqrt(DIM), dim=-1)
    return torch.einsum("hs,shd->hd", weights, v)


@pytest.mark.parametrize("tables", [[[3, 4, 5, 6]], [[6, 1, 4, 2]], [[6, 1, 4, 2], [5, 3]]])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_row_sees_what_it_should(
    tables: list[list[int]], rows: int, window: int | None, bidirectional: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(1, 7, BLOCK, KV_HEADS, DIM)
    lengths = [14, 7][: len(tables)]  # rows included
    stored = [fill(cache, table, n, generator) for table, n in zip(tables, lengths, strict=True)]
    positions = torch.stack([torch.arange(n - rows, n) for n in lengths])
    ends = torch.tensor(lengths)[:, None].expand(-1, rows) if bidirectional else None
    batch = AttentionBatch.build(positions, [rows] * len(tables), tables, BLOCK, visible_end=ends)
    assert (batch.contiguous is not None) == (tables == [[3, 4, 5, 6]])
    q = torch.randn(len(tables), rows, HEADS, DIM, generator=generator)
    out = paged_attention(q, 0, cache, batch, window)
    for b, (k, v) in enumerate(stored):
        for t in range(rows):
            position = int(positions[b, t])
            end = lengths[b] if bidirectional else position + 1
            first = max(0, position + 1 - window) if window else 0
            assert torch.allclose(out[b, t], naive(q[b, t], k, v, first, end), atol=1e-5)


def test_masks_are_made_once_and_only_where_needed() -> None:
    positions = torch.arange(8, 12)[None]
    batch = AttentionBatch.build(positions, [4], [[1, 2, 3]], BLOCK)
    assert batch.bias(None, torch.float32) is batch.bias(None, torch.float32)
    assert batch.bias(3, torch.float32) is not batch.bias(None, torch.float32)
    everything = AttentionBatch.build(positions, [4], [[1, 2, 3]], BLOCK, visible_end=torch.full((1, 4), 12))
    assert everything.bias(None, torch.float32) is None
    assert AttentionBatch.build(positions[:, -1:], [1], [[1, 2, 3]], BLOCK).bias(None, torch.float32) is None


def test_one_bad_request_does_not_reach_another() -> None:
    """NaN keys in pages of an unfinished or a finished request stay out of everyone else's sums."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(1, 8, BLOCK, KV_HEADS, DIM)
    fill(cache, [1], 3, generator)
    bad = AttentionBatch.build(torch.tensor([[0, 1], [2, 0]]), [2, 1], [[2, 3], [1, 4]], BLOCK)
    k = torch.randn(2, 2, KV_HEADS, DIM, generator=generator)
    k[0] = float("nan")
    bad.write(cache, 0, k, k)
    cache.k[0][4 * BLOCK :] = float("nan")  # a page that was freed by a bad request
    out = paged_attention(torch.randn(2, 2, HEADS, DIM, generator=generator), 0, cache, bad)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    assert not cache.k[0][:BLOCK].any()


def test_table_that_is_too_short() -> None:
    with pytest.raises(AssertionError):
        AttentionBatch.build(torch.arange(5)[None], [5], [[1]], BLOCK)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_rows_attend_as_they_do_in_their_places(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    tables, starts, lens = [[6, 1, 4, 2], [5, 3], [7, 8]], [9, 3, 1], [2, 4, 1]
    positions = torch.tensor(starts)[:, None] + torch.arange(4)
    dense = AttentionBatch.build(positions, lens, tables, BLOCK)
    packed = PackedBatch.build(dense, pack(torch.tensor(lens), pad_to=9))
    caches = [PagedKVCache(1, 9, BLOCK, KV_HEADS, DIM) for _ in range(2)]
    for cache in caches:
        history = torch.Generator().manual_seed(2)
        for table, start in zip(tables, starts, strict=True):
            fill(cache, table, start, history)
    q = torch.randn(3, 4, HEADS, DIM, generator=generator)
    k, v = (torch.randn(3, 4, KV_HEADS, DIM, generator=generator) for _ in range(2))
    dense.write(caches[0], 0, k, v)
    packed.write(caches[1], 0, packed.collect(k), packed.collect(v))
    assert torch.equal(caches[0].k[0], caches[1].k[0])
    assert torch.equal(caches[0].v[0], caches[1].v[0])
    assert not caches[1].k[0][:BLOCK].any(), "block 0 stays zero"
    expected = paged_attention(q, 0, caches[0], dense, window)
    found = paged_attention(packed.collect(q), 0, caches[1], packed, window)
    real = torch.arange(4) < torch.tensor(lens)[:, None]
    torch.testing.assert_close(found[0, : sum(lens)], expected[real])
    assert found.isfinite().all()
    assert packed.positions[0, : sum(lens)].tolist() == positions[real].tolist()
