"""Anchors and slot masks against their definition, and the sampler's order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_training import Samples, losses, make_trainer

from dspark.models.decoder import Decoder
from dspark.training.batch import anchor_candidates, collate, pack_rows, sample_anchors, slot_mask
from dspark.training.parallel import Ranks
from dspark.training.sampler import EpochSampler

MASK = np.array([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1])


def test_anchors_are_supervised_and_so_is_the_next_token() -> None:
    assert anchor_candidates(MASK).tolist() == [2, 3, 4, 8]
    chosen = sample_anchors(MASK, 3, np.random.default_rng(0))
    assert len(set(chosen.tolist())) == 3
    assert set(chosen.tolist()) <= {2, 3, 4, 8}


def test_slots_end_with_the_anchors_span() -> None:
    got = slot_mask(MASK, np.array([2, 4, 8]), 4)
    expected = [[all(a + i < len(MASK) and MASK[a + i] for i in range(1, k + 2)) for k in range(4)] for a in (2, 4, 8)]
    assert got.tolist() == expected


def test_an_empty_mask_gives_no_anchor() -> None:
    assert len(sample_anchors(np.zeros(5), 3, np.random.default_rng(0))) == 0


def test_every_epoch_sees_every_sample_once_in_another_order() -> None:
    sampler = EpochSampler(np.arange(23), batch_size=4, seed=3)
    epochs = [[sampler.batch(e * 5 + i).tolist() for i in range(5)] for e in range(2)]
    for epoch in epochs:
        flat = [i for batch in epoch for i in batch]
        assert len(flat) == len(set(flat)) == 20
    assert epochs[0] != epochs[1]
    again = EpochSampler(np.arange(23), batch_size=4, seed=3)
    assert again.batch(7).tolist() == epochs[1][2], "a batch is a function of the seed and its number alone"


def test_rows_are_filled_with_the_longest_first() -> None:
    assert pack_rows([3, 9, 5, 4, 12], None) == [[0], [1], [2], [3], [4]]
    assert pack_rows([3, 9, 5, 4, 12], 10) == [[4], [1], [2, 3], [0]]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 200).tolist()
    rows = pack_rows(lengths, 128)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert all(sum(lengths[i] for i in row) <= 128 for row in rows)
    assert len(rows) <= 1.1 * sum(lengths) / 128 + 1


def test_packing_moves_samples_and_changes_nothing_in_them(rows: Samples) -> None:
    """Tokens, states, anchors and slots of each conversation, found again at its place in a shared row."""
    samples = [row._replace(loss_mask=torch.ones_like(row.loss_mask)) for row in rows[:7]]  # spans reach the very end
    plain = collate(samples, 6, 3, np.random.default_rng(1))
    packed = collate(samples, 6, 3, np.random.default_rng(1), tokens_per_row=64)
    places = pack_rows([len(s.token_ids) for s in samples], 64)
    assert len(packed.token_ids) == len(places) < 7
    for b, row in enumerate(places):
        start, used = 0, 0
        for segment, i in enumerate(row):
            length, count = len(samples[i].token_ids), int(plain.valid[i].sum())
            here, anchors = slice(start, start + length), slice(used, used + count)
            assert (packed.segment_ids[b, here] == segment).all()
            for name in ("token_ids", "features", "last_hidden", "log_normalizer"):
                assert torch.equal(getattr(packed, name)[b, here], getattr(plain, name)[i, :length]), name
            assert torch.equal(packed.anchors[b, anchors] - start, plain.anchors[i, :count])
            assert packed.valid[b, anchors].all()
            assert torch.equal(packed.slot_mask[b, anchors], plain.slot_mask[i, :count])
            targets = packed.anchors[b, anchors, None] + 1 + torch.arange(3)
            assert (targets[packed.slot_mask[b, anchors]] < start + length).all(), "no slot reaches the neighbour"
            start, used = start + length, used + count
        assert (packed.segment_ids[b, start:] == -1).all()
        assert not packed.valid[b, used:].any()


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_packed_losses_are_the_unpacked_ones(
    target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks, kind: str
) -> None:
    shape: dict[str, object] = {"draft_vocab_size": 30, "markov_head_type": kind}
    for name, budget in (("plain", None), ("packed", 64)):
        changes: dict[str, object] = {"tokens_per_row": budget, "max_steps": 4}
        make_trainer(target, rows, tmp_path / name, alone, shape, changes).run()
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
