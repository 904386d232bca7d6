"""Round costs that follow what rounds really take, at a bounded rate.

A measured table ages: contexts grow, the machine gets busy, sampling costs more than the argmax it was measured with.
Three corrections multiply it. `drift` is one for all rounds and moves fast. One for rounds of about so many requests,
plain and speculative alike, moves slower: what other contexts than the measured ones cost grows with the requests, and
rounds of a kind that is not run must keep their place beside the others. The slowest one is for plain or for
speculative rounds of about so many rows.
"""

import math

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from dspark.spec.cost import RoundCosts

DRIFT_RATE = 0.12  # share of a round's error, in the logarithm, that the drift takes up
SIZE_RATE = 0.08
RATIO_RATE = 0.05
MAX_ERROR = math.log(2)  # a round that is off by more counts as off by this: a pause is no measurement
MAX_RATIO = math.log(2)
_CELLS_PER_DOUBLING = 2
_NUM_CELLS = 40
_MOST_KNOWN = 4096  # rounds whose table entries are kept: planning asks for the same ones again and again


class OnlineCosts:
    """`RoundCosts` corrected by measured rounds; it is `planner.Costs` too."""

    def __init__(self, table: RoundCosts) -> None:
        self.table = table
        self._log_drift = 0.0
        self._log_size = np.zeros(_NUM_CELLS)  # by requests
        # [0]: plain rounds by requests, [1]: speculative rounds by rows
        self._log_ratio = np.zeros((2, _NUM_CELLS))
        self._known: dict[tuple[int, tuple[int, ...], bytes, bytes], tuple[ndarray, ndarray, ndarray]] = {}

    @property
    def drift(self) -> float:
        """What rounds take now over what the table says."""
        return math.exp(self._log_drift)

    def seconds(
        self, num_requests: int, num_drafting: Int64[ndarray, "*n"], rows: Int64[ndarray, "*n"]
    ) -> Float64[ndarray, "*n"]:
        """See `planner.Costs`."""
        key = num_requests, rows.shape, num_drafting.tobytes(), rows.tobytes()
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            seconds = self.table.seconds(num_requests, num_drafting, rows)
            self._known[key] = seconds, np.minimum(num_drafting, 1), _cells(rows)
        seconds, kind, cell = self._known[key]
        shared = self._log_drift + self._log_size[_cell(num_requests)]
        corrected = seconds * np.exp(self._log_ratio[kind, cell] + shared)
        rising: ndarray = np.maximum.accumulate(corrected, axis=-1)
        return rising

    def observe(self, num_requests: int, num_drafting: int, num_rows: int, seconds: float) -> float:
        """Learn from a round that took so long; returns what had been expected of it."""
        drafting, rows = np.array([num_drafting]), np.array([num_rows])
        expected = float(self.seconds(num_requests, drafting, rows)[0])
        error = max(-MAX_ERROR, min(MAX_ERROR, math.log(seconds / expected)))
        self._log_drift += DRIFT_RATE * error
        cell = min(num_drafting, 1), _cell(num_rows)
        for log_ratio, place, rate in (
            (self._log_size, _cell(num_requests), SIZE_RATE),
            (self._log_ratio, cell, RATIO_RATE),
        ):
            corrected = float(log_ratio[place]) + rate * error
            log_ratio[place] = max(-MAX_RATIO, min(MAX_RATIO, corrected))
        return expected


def _cell(count: int) -> int:
    """Rounds of one cell take about the same share more or less than the table says."""
    return min(int(math.log2(max(count, 1)) * _CELLS_PER_DOUBLING), _NUM_CELLS - 1)


def _cells(rows: Int64[ndarray, "*n"]) -> Int64[ndarray, "*n"]:
    """The cell of each number of rows."""
    cells = np.log2(np.maximum(rows, 1)) * _CELLS_PER_DOUBLING
    within: ndarray = np.minimum(cells.astype(np.int64), _NUM_CELLS - 1)
    return within
