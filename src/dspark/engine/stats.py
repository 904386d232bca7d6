"""What the engine measures of itself: time by phase, tokens, accepted length; and the alarm for a useless drafter."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from dspark.log import get_logger

Phase = Literal["prefill", "draft", "plan", "verify", "accept", "commit"]
WATCHED_ROUNDS = 50
LOW_ACCEPTED_LENGTH = 1.15  # plain decoding is 1

_log = get_logger(__name__)


@dataclass
class EngineStats:
    """Running totals since the engine was made. Rounds count once a request that took part."""

    seconds: dict[Phase, float] = field(default_factory=dict)
    steps: int = 0  # decode rounds of a whole batch
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0  # speculative rounds
    committed: int = 0  # tokens these rounds put out, bonus counted
    drafted: int = 0  # drafts these rounds verified
    accepted_by_position: list[int] = field(default_factory=list)  # [i]: rounds whose draft i was put out

    @property
    def accepted_length(self) -> float | None:
        """Tau: tokens put out per speculative round of a request, bonus counted; None before the first."""
        return self.committed / self.rounds if self.rounds else None

    def record_round(self, num_drafts: int, num_accepted: int, num_committed: int) -> None:
        """Count one request's part in a speculative round: drafts verified and put out, tokens put out."""
        self.rounds += 1
        self.drafted += num_drafts
        self.committed += num_committed
        count_accepted(self.accepted_by_position, num_drafts, num_accepted)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def count_accepted(by_position: list[int], num_drafts: int, num_accepted: int) -> None:
    """Add one round to a table of how often the draft at each position was put out."""
    by_position += [0] * (num_drafts - len(by_position))
    for i in range(num_accepted):
        by_position[i] += 1


class AcceptanceWatch:
    """Warns once when the accepted length over the last 50 speculative rounds of the engine stays near 1."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, int]] = deque(maxlen=WATCHED_ROUNDS)
        self._warned = False

    def record(self, num_requests: int, num_committed: int) -> None:
        """Count one round in which `num_requests` verified drafts and put out `num_committed` tokens together."""
        if self._warned or not num_requests:
            return
        self._rounds.append((num_requests, num_committed))
        requests, committed = (sum(column) for column in zip(*self._rounds, strict=True))
        if len(self._rounds) < WATCHED_ROUNDS or committed >= LOW_ACCEPTED_LENGTH * requests:
            return
        self._warned = True
        _log.warning(
            "the drafter's accepted length is %.2f over %d rounds, so it slows decoding down. Usual causes: "
            "the slot convention (sample_from_anchor), target_layer_ids off by one, another target than the one it was "
            "trained for, a wrong mask_token_id",
            committed / requests,
            WATCHED_ROUNDS,
        )
