"""Flex attention over the paged cache against the gathered keys of `paged_attention`."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from dspark.models.attention import AttentionBatch, PackedBatch, paged_attention
from dspark.models.flex import fits
from dspark.models.kv_cache import PagedKVCache
from dspark.spec.layout import pack

BLOCK, NUM_BLOCKS, DIM = 4, 12, 8
TABLES = [[6, 1, 4, 2], [5, 3], [7, 8, 9, 10, 11]]  # of any order; the first has room that is not used


@pytest.fixture(autouse=True)
def no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU flex attention tells that it is not compiled."""
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"})


def filled(num_kv_heads: int) -> PagedKVCache:
    cache = PagedKVCache(1, NUM_BLOCKS, BLOCK, num_kv_heads, DIM)
    generator = torch.Generator().manual_seed(0)
    for stored in (cache.k[0], cache.v[0]):
        stored[BLOCK:] = torch.randn(stored[BLOCK:].shape, generator=generator)
    return cache


def compare(batch: AttentionBatch | PackedBatch, q: Tensor, num_kv_heads: int, window: int | None) -> None:
    cache = filled(num_kv_heads)
    expected = paged_attention(q, 0, cache, batch, window, 0.4)
    cache.attention = "flex"
    torch.testing.assert_close(paged_attention(q, 0, cache, batch, window, 0.4), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_flex_is_sdpa(rows: int, window: int | None, kv_heads: int, kind: str) -> None:
    lengths = [11, 7, 18]  # rows included
    positions = torch.stack([torch.arange(n - rows, n) for n in lengths])
    ends = torch.tensor(lengths)[:, None].expand(-1, rows) if kind == "bidirectional" else None
    q = torch.randn(3, rows, 6, DIM, generator=torch.Generator().manual_seed(1))
    compare(AttentionBatch.build(positions, [rows] * 3, TABLES, BLOCK, ends), q, kv_heads, window)
    compare(AttentionBatch.build(positions[:1], [rows], [[3, 4, 5]], BLOCK), q[:1], kv_heads, window)


@pytest.mark.parametrize("window", [None, 3])
def test_ragged_rows_and_a_row_of_a_chain(window: int | None) -> None:
    lens, starts = [5, 1, 3], torch.tensor([4, 6, 13])
    positions = starts[:, None] + torch.arange(5)
    dense = AttentionBatch.build(positions, lens, TABLES, BLOCK)
    q = torch.randn(1, 12, 6, DIM, generator=torch.Generator().manual_seed(1))
    batch = PackedBatch.build(dense, pack(torch.tensor(lens), 12))
    cache = filled(2)
    expected = paged_attention(q, 0, cache, batch, window)
    cache.attention = "flex"
    torch.testing.assert_close(paged_attention(q, 0, cache, batch, window)[0, :9], expected[0, :9])
    whole = AttentionBatch.build(positions[:2, :2], [2, 2], TABLES[:2], BLOCK)
    compare(whole.row(1), q[0, :2, None], 2, window)


def test_a_prompt_of_several_tiles() -> None:
    batch = AttentionBatch.build(torch.arange(20)[None], [20], [TABLES[2]], BLOCK)
    compare(batch, torch.randn(1, 20, 6, DIM, generator=torch.Generator().manual_seed(1)), 2, None)


def test_what_the_kernel_takes() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [fits(64, 16, gpu), fits(64, 4, gpu), fits(96, 16, gpu), fits(8, 16, gpu)] == [True, False, False, False]
    assert fits(8, 3, cpu)
