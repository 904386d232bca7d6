"""What a planner remembers of requests from round to round, by slot: which request holds it, and older survival.

Shapes: S slots, B requests of a round, G drafts.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

LAG = 2  # rounds between the survival that fixes a budget and the drafts it is spent on


class Slots:
    """Gives each request a slot for as long as it lives; a slot that changes owner counts its generation up."""

    def __init__(self, num_slots: int) -> None:
        self.generation: Int64[ndarray, " S"] = np.zeros(num_slots, dtype=np.int64)
        self._slot_of: dict[Hashable, int] = {}  # in the order in which they were last seen
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self, requests: Sequence[Hashable]) -> Int64[ndarray, " B"]:
        """The slots of a round's requests; a new one takes a free slot, or that of the request unseen for longest."""
        held = {request: self._slot_of.pop(request, None) for request in requests}
        for request, slot in held.items():
            if slot is None:
                slot = self._free.pop() if self._free else self._slot_of.pop(next(iter(self._slot_of)))
                self.generation[slot] += 1
            self._slot_of[request] = slot
        return np.array([self._slot_of[request] for request in requests], dtype=np.int64)

    def release(self, request: Hashable) -> None:
        """The request is done; unknown ones are passed over."""
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self._free.append(slot)


class LaggedRing:
    """Survival of the last rounds, each value stamped with the generation of its slot.

    Rounds in which nobody was drafted for do not count. What was written for a former owner of a slot, or not written,
    reads as 1.
    """

    def __init__(self, slots: Slots, num_drafts: int) -> None:
        num_slots = len(slots.generation)
        self._slots = slots
        self._survival = np.ones((LAG + 1, num_slots, num_drafts))
        self._generation = np.zeros((LAG + 1, num_slots), dtype=np.int64)  # no slot in use has generation 0
        self._round = 0

    def write(self, slots: Int64[ndarray, " B"], survival: Float64[ndarray, "B G"]) -> None:
        """Keep this round's survival, once in every round that drafts for anybody."""
        row = self._round % (LAG + 1)
        self._generation[row] = 0
        self._generation[row, slots] = self._slots.generation[slots]
        self._survival[row, slots] = survival
        self._round += 1

    def read(self, slots: Int64[ndarray, " B"]) -> Float64[ndarray, "B G"]:
        """The survival of `LAG` rounds before this one, which has not been written yet."""
        row = (self._round - LAG) % (LAG + 1)
        known = self._generation[row, slots] == self._slots.generation[slots]
        return np.where(known[:, None], self._survival[row, slots], 1.0)
