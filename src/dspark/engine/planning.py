"""The planner of an engine: whom to draft for, how many rows to verify, and what to learn from it.

Everything is decided from the past but for uses of this round's confidences that keep the output law: the early stop,
a request's own threshold, and the ranking within a budget fixed before (see `spec.planner`). Drafts are drawn anew in
every round (`round_seed`), so what earlier rounds drafted says nothing about this round's drafts.

Shapes: B requests, G drafts, T = G + 1 verify rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray
from torch import Tensor

from dspark.engine.config import PlannerKind
from dspark.engine.expectation import Correction, Expectation
from dspark.engine.lagged import LaggedRing, Slots
from dspark.errors import ConfigError
from dspark.log import get_logger
from dspark.spec.calibration import conditional
from dspark.spec.online import OnlineCosts
from dspark.spec.planner import choose_drafting, early_stop_plan, lagged_plan, survival_of
from dspark.spec.types import VerifyPlan

EXPLORED_SHARE = 0.005  # of the time may go into drafts for requests that do not seem worth it
LEAST_GAIN = 0.03  # drafts are made where they promise more than so much over plain decoding
LONGEST_REST = 16  # rounds that stay plain without a new look, where plain was best again and again
_KEPT_ERRORS = 4096

_log = get_logger(__name__)


@dataclass(frozen=True)
class RoundPlan:
    """What is decided of one round so far. Requests stand in a new order: the ones drafted for first."""

    order: Int64[ndarray, " B"]  # which request of those that the round was begun with stands in each place
    num_drafting: int  # b
    slots: Int64[ndarray, " B"]
    max_lens: Int64[ndarray, " B"]  # the longest verify lengths that the ends of range allow
    greedy: Bool[ndarray, " B"]
    verify_lens: Int64[ndarray, " B"]
    predicted: Float64[ndarray, "b G"] | None = None  # survival by this round's confidences, of those drafted for
    begun: float = 0.0


class Planner:
    """Plans one engine's rounds. Without costs, or as "static", it verifies whole blocks of every request."""

    def __init__(
        self,
        kind: PlannerKind,
        num_drafts: int,
        num_slots: int,
        costs: OnlineCosts | None,
        has_confidence: bool,
        temperatures: Sequence[float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kind = kind
        self._clock = clock
        self.num_drafts = num_drafts
        self.costs = costs
        self.temperatures = None if temperatures is None else tuple(temperatures[:num_drafts])
        if self.temperatures is not None and len(self.temperatures) < num_drafts:
            raise ConfigError(
                f"confidence_temperatures has {len(self.temperatures)} values for {num_drafts} drafts: give one a draft"
            )
        self.time_errors: deque[float] = deque(maxlen=_KEPT_ERRORS)  # |expected - measured| / measured, of each round
        self._slots = Slots(num_slots)
        self._ring = LaggedRing(self._slots, num_drafts)
        self._expectation = Expectation(self._slots, num_drafts, of_survival=has_confidence)
        self._correction = Correction(num_drafts)
        self._last_drafted = np.zeros(num_slots, dtype=np.int64)
        self._round = 0
        self._credit = 0.0  # seconds that may be spent on exploring
        self._rest = _Rest()
        if kind != "static" and costs is None and num_drafts:
            _log.warning(
                "planner %s has no cost table, so every draft is verified: measure one with `dspark profile` and name "
                'it in `costs`, or set costs = "measure"',
                kind,
            )

    @property
    def adapts(self) -> bool:
        """Whether plans depend on confidences and costs."""
        return self.kind != "static" and self.costs is not None

    def begin(
        self, requests: Sequence[Hashable], max_lens: Int64[ndarray, " B"], greedy: Bool[ndarray, " B"]
    ) -> RoundPlan:
        """Open a round and choose whom to draft for. max_lens is 1 where a request has nothing to draft for."""
        begun = self._clock()
        slots = self._slots.take(requests)
        drafting = max_lens > 1
        if self.adapts and drafting.any():
            drafting = self._choose(slots, max_lens)
        self._last_drafted[slots[drafting]] = self._round
        order = np.argsort(~drafting, kind="stable")
        max_lens, drafting = max_lens[order], drafting[order]
        lens = np.where(drafting, max_lens, 1)
        return RoundPlan(order, int(drafting.sum()), slots[order], max_lens, greedy[order], lens, begun=begun)

    def plan(self, begun: RoundPlan, confidence_logits: Tensor | None) -> RoundPlan:
        """Fix the verify lengths, with the confidences [b, G] of the requests drafted for; None without such a head."""
        count = begun.num_drafting
        if not self.adapts or not count:
            return begun
        expected = self._expectation.survival(begun.slots)
        predicted = None
        if confidence_logits is not None:
            predicted = survival_of(confidence_logits, self.temperatures)
            expected[:count] = self._correction.apply(predicted, begun.greedy[:count])
        plan = self.verify(self._ring.read(begun.slots), expected, begun.verify_lens, count)
        self._ring.write(begun.slots, expected)
        return replace(begun, verify_lens=plan.verify_lens.numpy(), predicted=predicted)

    def hold_to(self, planned: RoundPlan, confidence_logits: Tensor, thresholds: Float64[ndarray, " b"]) -> RoundPlan:
        """Verify no draft from the first one on whose confidence, given those before it, is below its request's.

        confidence_logits [b, G]. Whether a draft is kept follows from the drafts before it, so the output law stays.
        """
        confidence = conditional(confidence_logits, self.temperatures).cpu().numpy()
        kept = (confidence >= thresholds[:, None]).cumprod(axis=1).sum(axis=1)
        lens = planned.verify_lens.copy()
        lens[: len(kept)] = np.minimum(lens[: len(kept)], 1 + kept)
        return replace(planned, verify_lens=lens)

    def verify(
        self,
        older: Float64[ndarray, "B G"],
        survival: Float64[ndarray, "B G"],
        longest: Int64[ndarray, " B"],
        num_drafting: int,
    ) -> VerifyPlan:
        """The plan of a round, by survival two rounds ago and now."""
        assert self.costs is not None
        if self.kind == "early_stop":
            return early_stop_plan(survival, longest, self.costs, num_drafting)
        return lagged_plan(older, survival, longest, self.costs, num_drafting)

    def end(self, planned: RoundPlan, correct_len: Int64[ndarray, " b"], num_rows: int) -> None:
        """Learn from the round, which ends now: how far its drafts were accepted, and what so many rows took."""
        if not self.adapts:
            return
        assert self.costs is not None
        count, seconds = planned.num_drafting, self._clock() - planned.begun
        expected = self.costs.observe(len(planned.slots), count, num_rows, seconds)
        self.time_errors.append(abs(expected - seconds) / seconds)
        self._round += 1
        self._expectation.forget(planned.slots[count:])
        if count:
            self._learn(planned, correct_len)
        if (planned.max_lens[count:] > 1).any():
            self._credit += EXPLORED_SHARE * seconds

    def release(self, request: Hashable) -> None:
        """The request is done."""
        self._slots.release(request)

    def _learn(self, planned: RoundPlan, correct_len: Int64[ndarray, " b"]) -> None:
        count = planned.num_drafting
        slots, verify_lens, greedy = planned.slots[:count], planned.verify_lens[:count], planned.greedy[:count]
        if planned.predicted is not None:
            self._expectation.learn(slots, self._correction.apply(planned.predicted, greedy))
            self._correction.learn(planned.predicted, greedy, verify_lens, correct_len)
        else:
            position = np.arange(self.num_drafts)
            judged = (position <= correct_len[:, None]) & (position < verify_lens[:, None] - 1)
            self._expectation.learn(slots, (position < correct_len[:, None]).astype(np.float64), judged)

    def _choose(self, slots: Int64[ndarray, " B"], max_lens: Int64[ndarray, " B"]) -> Bool[ndarray, " B"]:
        """Draft for those who promise the most, and now and then for one who does not: confidence needs drafts."""
        assert self.costs is not None
        if self._rest.goes_on(len(slots)):
            return np.zeros(len(slots), dtype=bool)
        drafting = choose_drafting(self._expectation.survival(slots), max_lens, self.costs, LEAST_GAIN)
        self._rest.note(len(slots), bool(drafting.any()))
        idle = np.flatnonzero((max_lens > 1) & ~drafting)
        if len(idle):
            size, count = len(slots), int(drafting.sum())
            numbers = np.array([count, count + 1]), np.array([size, size + 1])
            without, with_one = self.costs.seconds(size, *numbers)
            if self._credit >= with_one - without:
                self._credit = 0.0
                drafting[idle[self._last_drafted[slots[idle]].argmin()]] = True
        return drafting


class _Rest:
    """Plain rounds without a new look at whom to draft for: 0, 1, 3, 7, ... after each look that says nobody.

    A batch of another size ends it, one that differs by more than an eighth.
    """

    def __init__(self) -> None:
        self._size = 0
        self._length = 0
        self._left = 0

    def goes_on(self, size: int) -> bool:
        """Whether this round needs no look; counts it."""
        if self._left <= 0 or not self._is_alike(size):
            return False
        self._left -= 1
        return True

    def note(self, size: int, anybody: bool) -> None:
        """A look was taken at a batch of so many requests."""
        kept = not anybody and self._is_alike(size)
        self._left = self._length if kept else 0
        self._length = min(2 * self._length + 1, LONGEST_REST) if kept else 0
        self._size = size

    def _is_alike(self, size: int) -> bool:
        return abs(size - self._size) <= self._size // 8
