"""Round costs that follow what rounds really take, at a bounded rate.

A measured table ages: contexts grow, the machine gets busy, sampling costs more than the argmax it was measured with.
Two corrections multiply it. `drift` is one for all rounds and moves fast; a `ratio` of its own for plain and for
speculative rounds of about so many rows moves slowly, so that rounds of a kind that is not run keep their place beside
the others.
"""

import math

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from dspark.spec.cost import RoundCosts

DRIFT_RATE = 0.2  # share of a round's error, in the logarithm, that the drift takes up
RATIO_RATE = 0.05
MAX_ERROR = math.log(2)  # a round that is off by more counts as off by this: a pause is no measurement
MAX_RATIO = math.log(2)
_CELLS_PER_DOUBLING = 2
_NUM_CELLS = 40


class OnlineCosts:
    """`RoundCosts` corrected by measured rounds; it is `planner.Costs` too."""

    def __init__(self, table: RoundCosts) -> None:
        self.table = table
        self._log_drift = 0.0
        # [0]: plain rounds by requests, [1]: speculative rounds by rows
        self._log_ratio = np.zeros((2, _NUM_CELLS))

    @property
    def drift(self) -> float:
        """What rounds take now over what the table says."""
        return math.exp(self._log_drift)

    def seconds(
        self, num_requests: int, num_drafting: Int64[ndarray, "*n"], rows: Int64[ndarray, "*n"]
    ) -> Float64[ndarray, "*n"]:
        """See `planner.Costs`."""
        ratio = np.exp(self._log_ratio[np.minimum(num_drafting, 1), _cell(rows)])
        corrected = self.table.seconds(num_requests, num_drafting, rows) * (ratio * self.drift)
        rising: ndarray = np.maximum.accumulate(corrected, axis=-1)
        return rising

    def observe(self, num_requests: int, num_drafting: int, num_rows: int, seconds: float) -> float:
        """Learn from a round that took so long; returns what had been expected of it."""
        drafting, rows = np.array([num_drafting]), np.array([num_rows])
        expected = float(self.seconds(num_requests, drafting, rows)[0])
        error = max(-MAX_ERROR, min(MAX_ERROR, math.log(seconds / expected)))
        self._log_drift += DRIFT_RATE * error
        cell = min(num_drafting, 1), int(_cell(rows)[0])
        corrected = float(self._log_ratio[cell]) + RATIO_RATE * error
        self._log_ratio[cell] = max(-MAX_RATIO, min(MAX_RATIO, corrected))
        return expected


def _cell(rows: Int64[ndarray, "*n"]) -> Int64[ndarray, "*n"]:
    """Rows of one cell cost about the same share more or less than the table says."""
    cells = np.log2(np.maximum(rows, 1)) * _CELLS_PER_DOUBLING
    within: ndarray = np.minimum(cells.astype(np.int64), _NUM_CELLS - 1)
    return within
