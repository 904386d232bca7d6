"""Which samples a step sees: a pure function of (seed, step), so that resuming needs no state."""

from __future__ import annotations

import numpy as np


class EpochSampler:
    """A seeded permutation per epoch, cut into batches of similar length.

    `lengths` [n] are the samples' token counts; `batch_size` sequences make a micro-batch. Samples left over at the
    end of an epoch's permutation (fewer than a batch) wait for the next epoch's shuffle.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = lengths, min(batch_size, len(lengths)), seed
        self.batches_per_epoch = len(lengths) // self.batch_size
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def batch(self, index: int) -> np.ndarray:
        """Sample indices of micro-batch `index`, counted from 0 over all epochs."""
        epoch, place = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        batch: np.ndarray = self._order[place]
        return batch

    def _shuffled(self, epoch: int) -> np.ndarray:
        """[batches, batch_size]: shuffle, sort by length inside windows of 16 batches, shuffle the batches."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.lengths))[: self.batches_per_epoch * self.batch_size]
        window = 16 * self.batch_size
        parts = [order[i : i + window] for i in range(0, len(order), window)]
        order = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in parts])
        batches = order.reshape(self.batches_per_epoch, self.batch_size)
        return batches[rng.permutation(len(batches))]
