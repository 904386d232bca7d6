"""Simulated requests: when they come, what sort they are, and how long their answers get.

Which requests come depends on the seed and the load alone, so all policies serve the same ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import log1p

import numpy as np

from dspark.evaluation.acceptance import Acceptance

# Steps whose multiples, modulo 1, fill the unit square more evenly than random numbers do: 1/g and 1/g^2 of the root g
# of g^3 = g + 1. The mix of requests is then the one that was asked for even where few of them are simulated.
_STEPS = np.array([0.7548776662466927, 0.5698402909980532])


@dataclass(eq=False)
class Simulated:
    """A request: its sort, the tokens it still wants, and when it came."""

    sort: int
    left: int
    arrived: float


class Load:
    """Requests that come at random times (`arrivals` a second), or one for each that is done; exponential lengths.

    `most` are decoded together at most; the others wait in the order in which they came.
    """

    def __init__(self, acceptance: Acceptance, length: float, arrivals: float | None, most: int, seed: int) -> None:
        self.arrivals, self.most = arrivals, most
        self.waits: list[float] = []  # seconds, of each request that was admitted
        self._acceptance, self._length = acceptance, length
        self._draw = np.random.default_rng(seed)
        self._place = self._draw.random(2)
        self._next = 0.0
        self._waiting: deque[Simulated] = deque()

    def admit(self, active: list[Simulated], clock: float) -> float:
        """Add what has come to the active requests; returns the time, which goes on to the next arrival if all idle."""
        if self.arrivals is None:
            active += [self._request(clock) for _ in range(self.most - len(active))]
            return clock
        if not active and not self._waiting:
            clock = max(clock, self._next)
        while self._next <= clock:
            self._waiting.append(self._request(self._next))
            self._next += self._draw.exponential(1 / self.arrivals)
        while self._waiting and len(active) < self.most:
            active.append(self._waiting.popleft())
            self.waits.append(clock - active[-1].arrived)
        return clock

    def _request(self, arrived: float) -> Simulated:
        self._place = (self._place + _STEPS) % 1
        kind, length = self._place.tolist()
        return Simulated(self._acceptance.sort_at(kind), 1 + int(-self._length * log1p(-length)), arrived)
