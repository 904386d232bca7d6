"""Logits and every tap against transformers, in float32: prefill, cached decode, batches, pages in any order."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from dspark.models.attention import AttentionBatch
from dspark.models.decoder import Decoder, DecoderOutput
from dspark.models.kv_cache import PagedKVCache
from dspark.models.weights import load_decoder

from .conftest import FAMILIES

BLOCK = 4
TOLERANCE = 1e-5
Save = Callable[..., tuple[transformers.PreTrainedModel, Path]]


def close(ours: Tensor, reference: Tensor) -> bool:
    """Whether the largest error is at most 1e-5 of the largest value."""
    return float((ours - reference).abs().max() / reference.abs().max()) <= TOLERANCE


def reference_run(model: transformers.PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' logits [1, N, V] and residual stream after the embeddings and each layer [1, N, L+1, H]."""
    states: list[Tensor] = []
    hooks = [model.model.embed_tokens.register_forward_hook(lambda _m, _a, out: states.append(out))]
    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(lambda _m, _a, out: states.append(out)))
    logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(states, dim=2)


def run(decoder: Decoder, ids: Tensor, start: int, table: list[int], cache: PagedKVCache) -> DecoderOutput:
    """Feed ids [1, T] at positions start.., tapping everything."""
    positions = torch.arange(start, start + ids.shape[1])[None]
    batch = AttentionBatch.build(positions, [ids.shape[1]], [table], BLOCK)
    return decoder(ids, batch, cache, tuple(range(-1, decoder.config.num_hidden_layers)))


@pytest.mark.parametrize("table", [[2, 3, 4, 5, 6, 7, 8], [9, 2, 6, 1, 8, 3, 4]], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_chunks(name: str, table: list[int], save_reference: Save) -> None:
    model, path = save_reference(name)
    decoder = load_decoder(path)
    ids = torch.randint(3, 101, (1, 27), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits, states = reference_run(model, ids)
        for cuts in ([0, 27], [0, 11, 12, 13, 21, 27]):
            cache = decoder.new_cache(10, BLOCK)
            parts = [run(decoder, ids[:, a:b], a, table, cache) for a, b in pairwise(cuts)]
            assert close(torch.cat([decoder.logits(part.hidden) for part in parts], dim=1), logits)
            taps = torch.cat([part.taps for part in parts], dim=1)
            for tap in range(taps.shape[2]):
                assert close(taps[:, :, tap], states[:, :, tap]), f"tap {tap - 1}"
            assert torch.equal(torch.cat([part.hidden for part in parts], dim=1), taps[:, :, -1])


@pytest.mark.parametrize("name", FAMILIES)
def test_batch_of_different_lengths(name: str, save_reference: Save) -> None:
    """Three requests, prefilled together with padding, then advanced by 5, 1 and 3 rows in one forward."""
    model, path = save_reference(name)
    decoder = load_decoder(path)
    generator = torch.Generator().manual_seed(2)
    lengths, steps = [3, 17, 9], [5, 1, 3]
    rows = [torch.randint(3, 101, (n + s,), generator=generator) for n, s in zip(lengths, steps, strict=True)]
    tables = [[7, 3], [1, 2, 4, 5, 6], [12, 11, 10]]
    cache = decoder.new_cache(13, BLOCK)
    taps = tuple(range(-1, decoder.config.num_hidden_layers))
    with torch.inference_mode():
        wanted = [reference_run(model, row[None]) for row in rows]
        for starts, counts in (([0, 0, 0], lengths), (lengths, steps)):
            positions, ids = torch.full((3, max(counts)), 99), torch.zeros(3, max(counts), dtype=torch.long)
            for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
                positions[b, :count] = torch.arange(start, start + count)
                ids[b, :count] = rows[b][start : start + count]
            out = decoder(ids, AttentionBatch.build(positions, counts, tables, BLOCK), cache, taps)
            logits = decoder.logits(out.hidden)
            assert logits.isfinite().all()
            for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
                assert close(logits[b, :count], wanted[b][0][0, start : start + count])
                assert close(out.taps[b, :count], wanted[b][1][0, start : start + count])
    assert not any(stored[:BLOCK].any() for stored in (*cache.k, *cache.v))


def test_dynamic_rope_past_its_length(save_reference: Save) -> None:
    """Past max_position_embeddings each position is stretched as transformers does when it decodes token by token."""
    model, path = save_reference("llama_dynamic")
    decoder = load_decoder(path)
    ids = torch.randint(3, 101, (1, 140), generator=torch.Generator().manual_seed(3))
    cache = decoder.new_cache(36, BLOCK)
    past = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :120], cache=past)
        wanted = [model(ids[:, i : i + 1], cache=past).logits for i in range(120, 140)]
        run(decoder, ids[:, :120], 0, list(range(1, 36)), cache)
        out = run(decoder, ids[:, 120:], 120, list(range(1, 36)), cache)
        assert close(decoder.logits(out.hidden), torch.cat(wanted, dim=1))


def test_bfloat16_stays_near_transformers(save_reference: Save) -> None:
    model, path = save_reference("qwen3")
    decoder = load_decoder(path, torch.bfloat16)
    ids = torch.randint(3, 101, (1, 27), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        exact = model(ids).logits
        rounded = model.bfloat16()(ids).logits.float()
        cache = decoder.new_cache(9, BLOCK)
        ours = decoder.logits(run(decoder, ids, 0, list(range(1, 8)), cache).hidden)
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - exact).norm() < 1.5 * (rounded - exact).norm()
