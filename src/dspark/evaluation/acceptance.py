"""How drafts are accepted in a simulation: laws that are given, or rounds that were recorded.

Shapes: N requests drafted for in a round, G drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy.optimize import brentq

from dspark.engine.request import RoundRecord
from dspark.errors import ConfigError, DataError
from dspark.files import read_jsonl

_LEAST_CHANCE = 1e-6  # so that every logit is finite


class Outcomes(NamedTuple):
    """The drafts of rounds: what the confidence head says, and how many would be accepted if all were verified."""

    confidence_logits: ndarray | None  # [N, G]; None without such a head
    correct_len: ndarray  # [N]


class Acceptance(Protocol):
    """A source of rounds."""

    num_drafts: int  # G
    has_confidence: bool

    def sort_at(self, place: float) -> int:
        """The sort of request at a place in [0, 1): each sort has its share of it."""

    def rounds(self, sorts: ndarray, draw: Generator) -> Outcomes:
        """One round of requests of these sorts [N]."""

    def accepted_length(self) -> float:
        """Tokens over full-width rounds of many requests of one length: sorts that are accepted less run longer."""


class GivenAcceptance:
    """Sorts of requests whose drafts are accepted with chances that vary round the sort's own, and are known.

    Each draft's chance is drawn from a beta distribution with the sort's mean; the smaller `concentration`, the more
    the chances differ. The confidence is that chance: a calibrated head.
    """

    has_confidence = True

    def __init__(self, chances: Sequence[Sequence[float]], concentration: float) -> None:
        """chances: of each sort, all equally frequent, by position, given that all drafts before were accepted."""
        self.mean = np.array(chances, dtype=np.float64).clip(_LEAST_CHANCE, 1 - _LEAST_CHANCE)  # [sorts, G]
        self.concentration = concentration
        self.num_drafts = self.mean.shape[1]

    def sort_at(self, place: float) -> int:
        """See `Acceptance`."""
        return int(place * len(self.mean))

    def rounds(self, sorts: ndarray, draw: Generator) -> Outcomes:
        """See `Acceptance`."""
        mean = self.mean[sorts]
        chance = draw.beta(mean * self.concentration, (1 - mean) * self.concentration)
        accepted = draw.random(chance.shape) < chance
        chance = chance.clip(_LEAST_CHANCE, 1 - _LEAST_CHANCE)
        return Outcomes(np.log(chance / (1 - chance)), accepted.cumprod(1).sum(1))

    def accepted_length(self) -> float:
        """See `Acceptance`."""
        return 1 / float((1 / (1 + self.mean.cumprod(1).sum(1))).mean())


class RecordedAcceptance:
    """Recorded full-width rounds, drawn again: a simulated request is one of those recorded."""

    def __init__(self, requests: Sequence[Outcomes], num_drafts: int) -> None:
        """requests: the rounds of each, all with confidences or none."""
        self.num_drafts = num_drafts
        self._sizes = np.array([len(rounds.correct_len) for rounds in requests])
        self._starts = np.concatenate(([0], self._sizes.cumsum()[:-1]))
        logits = [rounds.confidence_logits for rounds in requests if rounds.confidence_logits is not None]
        self._logits = np.concatenate(logits) if logits else None
        self._correct = np.concatenate([rounds.correct_len for rounds in requests])
        self.has_confidence = self._logits is not None

    @classmethod
    def read(cls, path: Path) -> RecordedAcceptance:
        """Read the rounds that `dspark eval` and `dspark calibrate` keep, the answers of a line as one request.

        Rounds that were cut short hold censored outcomes and are left out. Raises DataError.
        """
        requests, widths = [], set[tuple[int, int]]()
        for number, row in read_jsonl(path):
            whole = _whole_rounds(row, f"{path}: line {number}")
            if not whole:
                continue
            widths |= {(record.num_drafts, len(record.confidence_logits)) for record in whole}
            logits = np.array([record.confidence_logits for record in whole]) if whole[0].confidence_logits else None
            requests.append(Outcomes(logits, np.array([record.correct_len for record in whole])))
        if not requests:
            raise DataError(
                f"{path}: has no full-width rounds: name rows.jsonl of `dspark eval` or calibration.rounds.jsonl of "
                "`dspark calibrate`, without a planner"
            )
        if len(widths) > 1:
            raise DataError(f"{path}: has rounds of several drafters: name a file of one drafter")
        return cls(requests, widths.pop()[0])

    def sort_at(self, place: float) -> int:
        """See `Acceptance`."""
        return int(place * len(self._sizes))

    def rounds(self, sorts: ndarray, draw: Generator) -> Outcomes:
        """See `Acceptance`."""
        rows = self._starts[sorts] + (draw.random(len(sorts)) * self._sizes[sorts]).astype(np.int64)
        return Outcomes(None if self._logits is None else self._logits[rows], self._correct[rows])

    def accepted_length(self) -> float:
        """See `Acceptance`."""
        lengths = 1 + np.add.reduceat(self._correct, self._starts) / self._sizes
        return 1 / float((1 / lengths).mean())


def constant_chance(accepted_length: float, num_drafts: int) -> float:
    """The chance that, the same at every position, gives this accepted length: 1 + p + p^2 + ... of so many drafts."""
    if not 1 < accepted_length < num_drafts + 1:
        raise ConfigError(f"accepted_length: {accepted_length} is not between 1 and {num_drafts + 1}")
    powers = np.arange(num_drafts + 1)
    return float(brentq(lambda p: float((p**powers).sum()) - accepted_length, 0.0, 1.0))


def _whole_rounds(row: Mapping[str, Any], where: str) -> list[RoundRecord]:
    """The full-width rounds of a line, each [position, verify_len, num_drafts, correct_len, num_output, [logits]]."""
    try:
        records = [RoundRecord(*fields) for fields in row.get("rounds", [])]
        return [record for record in records if record.num_drafts > 0 and record.is_full_width]
    except TypeError:
        raise DataError(f"{where}: `rounds` is not a list of round records") from None
