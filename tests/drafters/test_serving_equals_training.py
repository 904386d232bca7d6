"""The block a drafter serves is the block it was trained on: two code paths, one result."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark.drafters.dspark import BlockDrafter
from dspark.models.decoder import Decoder
from dspark.spec.types import SamplingRows

VARIANTS = [
    {},
    {"sample_from_anchor": False},
    {"block_attention": "causal"},
    {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention")},
    {"markov_rank": 0, "confidence_head_with_markov": False, "qk_norm": False},
    {"layer_style": "gemma4", "attention_k_eq_v": True, "hidden_act": "gelu_pytorch_tanh"},
]


def sequence(length: int, taps: int, hidden: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 40, (1, length), generator=generator)
    return ids, torch.randn(1, length, taps, hidden, generator=generator)


def served_hidden(drafter: BlockDrafter, ids: Tensor, features: Tensor, anchor: int) -> Tensor:
    """Context of [0, anchor) injected, then one block drafted: [G, H]."""
    cache = drafter.new_cache(num_blocks=20, block_size=4)
    table = [7, 2, 9, 4, 5, 6, 11, 12]
    slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(anchor)])
    drafter.inject(features[0, :anchor], ids[0, 1 : anchor + 1], torch.arange(anchor), slots, cache)
    batch = drafter.draft_batch([anchor], [table], 4)
    block = torch.full((1, drafter.config.query_rows), drafter.config.mask_token_id)
    block[0, 0] = ids[0, anchor]
    hidden = drafter.backbone.draft(drafter.embed(block), batch, cache)[0]
    return hidden if drafter.config.sample_from_anchor else hidden[1:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_agree(make_drafter: Callable[..., BlockDrafter], variant: dict[str, object]) -> None:
    drafter = make_drafter(**variant)
    ids, features = sequence(24, 3, 32)
    anchors = torch.tensor([[1, 6, 7, 8, 20]])
    with torch.no_grad():
        trained = drafter.train_hidden(ids, features, anchors, torch.ones_like(anchors, dtype=torch.bool))
        for a, anchor in enumerate(anchors[0].tolist()):
            served = served_hidden(drafter, ids, features, anchor)
            torch.testing.assert_close(served, trained[0, a], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_leaks_from_the_future(make_drafter: Callable[..., BlockDrafter], variant: dict[str, object]) -> None:
    """Changing tokens and features from position t on moves no block whose anchor is before t, neighbours included."""
    drafter = make_drafter(**variant)
    ids, features = sequence(24, 3, 32)
    anchors = torch.arange(1, 20)[None]  # every block overlaps its neighbours
    valid = torch.ones_like(anchors, dtype=torch.bool)
    with torch.no_grad():
        before = drafter.train_hidden(ids, features, anchors, valid)
        for t in (2, 9, 15):
            changed_ids, changed = ids.clone(), features.clone()
            changed_ids[:, t:] = (changed_ids[:, t:] + 1) % 40
            changed[:, t:] += 1.0
            after = drafter.train_hidden(changed_ids, changed, anchors, valid)
            kept = anchors[0] < t
            torch.testing.assert_close(after[:, kept], before[:, kept], rtol=0, atol=0)
            moved = (after - before).abs().amax(dim=(0, 2, 3))
            assert (moved[~kept] > 1e-4).all(), "a block must depend on its anchor and on the context before it"


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_leaks_between_conversations_of_a_row(
    make_drafter: Callable[..., BlockDrafter], variant: dict[str, object]
) -> None:
    """Blocks are those of each conversation alone, and changing one of them moves no block of its neighbours."""
    drafter = make_drafter(**variant)
    ids, features = sequence(24, 3, 32)
    spans = [(0, 7), (7, 16), (16, 24)]
    segment_ids = torch.tensor([[segment for segment, (a, b) in enumerate(spans) for _ in range(a, b)]])
    anchors = torch.tensor([[a + i for a, _ in spans for i in (0, 1, 5, 6)]])  # the first and the last place included
    valid = torch.ones_like(anchors, dtype=torch.bool)
    with torch.no_grad():
        packed = drafter.train_hidden(ids, features, anchors, valid, segment_ids)
        for segment, (a, b) in enumerate(spans):
            own = slice(4 * segment, 4 * segment + 4)
            alone = drafter.train_hidden(ids[:, a:b], features[:, a:b], anchors[:, own] - a, valid[:, own])
            torch.testing.assert_close(packed[:, own], alone, rtol=1e-5, atol=1e-5)
            changed_ids, changed = ids.clone(), features.clone()
            changed_ids[:, a:b] = (changed_ids[:, a:b] + 1) % 40
            changed[:, a:b] += 1.0
            moved = (drafter.train_hidden(changed_ids, changed, anchors, valid, segment_ids) - packed).abs()
            moved = moved.amax(dim=(0, 2, 3))
            assert (moved[own] > 1e-4).all()
            assert not moved[: own.start].any()
            assert not moved[own.stop :].any()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("size", [None, 17])
def test_greedy_block_is_the_argmax_of_the_training_logits(
    make_drafter: Callable[..., BlockDrafter], kind: str, size: int | None
) -> None:
    """Feed the drafted tokens back as ground truth: the training path's logits have their argmax at each draft."""
    drafter = make_drafter(markov_head_type=kind, draft_vocab_size=size).prepare()
    ids, features = sequence(24, 3, 32)
    cache = drafter.new_cache(num_blocks=10, block_size=4)
    table = list(range(1, 9))
    slots = torch.arange(4, 4 + 10)
    with torch.inference_mode():
        drafter.inject(features[0, :10], ids[0, 1:11], torch.arange(10), slots, cache)
        rows = SamplingRows(
            torch.zeros(1),
            torch.zeros(1, dtype=torch.long),
            torch.ones(1),
            torch.zeros(1),
            torch.zeros(1, dtype=torch.long),
        )
        batch = drafter.draft_batch([10], [table], 4)
        block = drafter.propose(ids[:, 10], batch, cache, rows, torch.tensor([10]), drafter.num_drafts)
        hidden = drafter.train_hidden(ids, features, torch.tensor([[10]]), torch.tensor([[True]]))[0]
        previous = torch.cat([ids[:, 10:11], block.tokens[:, :-1]], dim=1)
        assert drafter.markov_head is not None
        assert drafter.confidence_head is not None
        feature, embedded = drafter.markov_head.block(previous, hidden)
        logits = hidden @ drafter.lm_head_weight.T + drafter.markov_head.markov_w2(feature)
        best = logits.argmax(dim=-1)
        best = best if drafter.token_ids is None else drafter.token_ids[best]
        assert torch.equal(best, block.tokens)
        assert block.confidence_logits is not None
        expected = drafter.confidence_head(hidden, embedded)
        torch.testing.assert_close(block.confidence_logits, expected, rtol=1e-5, atol=1e-5)


def test_serving_takes_the_targets_dtype(make_drafter: Callable[..., BlockDrafter], target: Decoder) -> None:
    """Beside a bfloat16 target the drafter's bytes are bfloat16 too, the feature scale folded in before rounding."""
    ids, features = sequence(24, 3, 32)
    exact = make_drafter()
    exact.backbone.feature_scale.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(2))
    expected = served_hidden(exact, ids, features, 10)
    target.bfloat16()
    drafter = make_drafter()
    drafter.backbone.feature_scale.copy_(exact.backbone.feature_scale)
    drafter.prepare()
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    served = served_hidden(drafter, ids, features.bfloat16(), 10)
    assert served.dtype == torch.bfloat16
    assert (served.float() - expected).abs().mean() < 0.03 * expected.abs().mean()
