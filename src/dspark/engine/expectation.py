"""What earlier rounds let expect of the next drafts, by request and over all: for plans made before there are drafts.

Shapes: S slots, B requests of a round, G drafts.
"""

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from dspark.engine.lagged import Slots

_OWN_ROUNDS = 8.0  # a request's own rounds count for at most so many
_PRIOR_ROUNDS = 2.0  # what all requests together showed counts for so many
_PRIOR_RATE = 0.02  # weight of one request's round among those of all, at least
_IDLE = 0.98  # what is left of a request's own weight after a round without drafts
_CORRECTED_ROUNDS = 500.0  # rounds over which predicted and actual survival are compared
_SURE_ROUNDS = 20.0  # pretended rounds in which the two agreed
_MAX_CORRECTION = 4.0


class Expectation:
    """Smoothed survival of each draft or, where that can not be seen, chances given that all before it were accepted.

    Both are 1 before the first round. `of_survival`: whether `learn` is given survival.
    """

    def __init__(self, slots: Slots, num_drafts: int, of_survival: bool) -> None:
        num_slots = len(slots.generation)
        self._of_survival = of_survival
        self._slots = slots
        self._chance: Float64[ndarray, "S G"] = np.ones((num_slots, num_drafts))
        self._weight = np.zeros((num_slots, num_drafts))
        self._owner = np.zeros(num_slots, dtype=np.int64)  # generation that the figures of a slot are of
        self._prior = np.ones(num_drafts)
        self._prior_weight = np.zeros(num_drafts)

    def survival(self, slots: Int64[ndarray, " B"]) -> Float64[ndarray, "B G"]:
        """Expected survival of each request's next drafts."""
        self._renew(slots)
        weight = self._weight[slots]
        chance: ndarray = (weight * self._chance[slots] + _PRIOR_ROUNDS * self._prior) / (weight + _PRIOR_ROUNDS)
        return chance if self._of_survival else chance.cumprod(1)

    def learn(
        self, slots: Int64[ndarray, " B"], chance: Float64[ndarray, "B G"], known: Bool[ndarray, "B G"] | None = None
    ) -> None:
        """A round's survival or, where `known`, its outcomes (1 accepted, 0 rejected)."""
        if known is None:
            known = np.ones_like(chance, dtype=bool)
        self._renew(slots)
        self._weight[slots] = np.minimum(self._weight[slots] + known, _OWN_ROUNDS)
        rate = known / np.maximum(self._weight[slots], 1.0)
        self._chance[slots] += rate * (chance - self._chance[slots])
        count = known.sum(0)
        self._prior_weight += count
        total = np.maximum(np.minimum(self._prior_weight, 1 / _PRIOR_RATE), 1.0)
        mean = (known * chance).sum(0) / np.maximum(count, 1)
        self._prior += np.minimum(count / total, 1.0) * (mean - self._prior)

    def forget(self, slots: Int64[ndarray, " b"]) -> None:
        """These requests had no drafts this round: what is known of them ages."""
        self._weight[slots] *= _IDLE

    def _renew(self, slots: Int64[ndarray, " B"]) -> None:
        """Clear what was learnt of former owners."""
        changed = slots[self._owner[slots] != self._slots.generation[slots]]
        self._weight[changed] = 0.0
        self._owner[slots] = self._slots.generation[slots]


class Correction:
    """Actual over predicted survival by position, of greedy and of sampled requests: what a calibration left over.

    Only verified drafts are compared. Whether a draft is verified is decided by what comes before it, so they are a
    fair sample at their survival.
    """

    def __init__(self, num_drafts: int) -> None:
        self._predicted = np.full((2, num_drafts), _SURE_ROUNDS)
        self._actual = np.full((2, num_drafts), _SURE_ROUNDS)

    def apply(self, survival: Float64[ndarray, "B G"], greedy: Bool[ndarray, " B"]) -> Float64[ndarray, "B G"]:
        """Corrected survival; it still never rises along a request, nor above 1."""
        ratio = self._actual / self._predicted
        ratio = np.minimum(np.maximum(ratio, 1 / _MAX_CORRECTION), _MAX_CORRECTION)
        return np.minimum.accumulate(np.minimum(survival * ratio[greedy.astype(np.int64)], 1.0), axis=1)

    def learn(
        self,
        survival: Float64[ndarray, "B G"],
        greedy: Bool[ndarray, " B"],
        verify_lens: Int64[ndarray, " B"],
        correct_len: Int64[ndarray, " B"],
    ) -> None:
        """Compare a round's predicted survival (uncorrected) with how far its drafts were accepted."""
        position = np.arange(survival.shape[1])
        judged = position < verify_lens[:, None] - 1
        actual = judged & (position < correct_len[:, None])
        for kind in (0, 1):
            of_kind = greedy == bool(kind)
            keep = 1 - judged[of_kind].sum(0) / _CORRECTED_ROUNDS
            for sums, values in ((self._predicted, survival * judged), (self._actual, actual)):
                sums[kind] = sums[kind] * keep + values[of_kind].sum(0)
