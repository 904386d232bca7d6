"""Anchors and slot masks against their definition, and the sampler's order."""

import numpy as np

from dspark.training.batch import anchor_candidates, sample_anchors, slot_mask
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
