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
class RoundFigures:
    """Counts over speculative rounds, one a request and round. A round that a stop cut counts what it put out."""

    rounds: int = 0
    committed: int = 0  # tokens these rounds put out, bonus counted
    proposed: int = 0  # drafts proposed
    drafted: int = 0  # drafts verified
    accepted_by_position: list[int] = field(default_factory=list)  # [i]: rounds whose draft i was put out
    committed_lens: list[int] = field(default_factory=list)  # [n]: rounds that put out n tokens
    verify_lens: list[int] = field(default_factory=list)  # [n]: rounds whose verify length (or cap) was n

    @property
    def accepted(self) -> int:
        """Drafts put out."""
        return sum(self.accepted_by_position)

    @property
    def accepted_length(self) -> float | None:
        """Tau: tokens put out per speculative round, bonus counted; None before the first."""
        return self.committed / self.rounds if self.rounds else None

    def record_round(self, num_drafts: int, verify_len: int, num_accepted: int, num_committed: int) -> None:
        """Count one round of one request: drafts proposed, rows verified, drafts put out, tokens put out."""
        self.rounds += 1
        self.committed += num_committed
        self.proposed += num_drafts
        self.drafted += verify_len - 1
        _count(self.committed_lens, num_committed)
        _count(self.verify_lens, verify_len)
        self.accepted_by_position += [0] * (verify_len - 1 - len(self.accepted_by_position))
        for i in range(num_accepted):
            self.accepted_by_position[i] += 1


@dataclass
class RequestFigures(RoundFigures):
    """What one request took, besides its rounds. Times are seconds since it was submitted."""

    cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    preemptions: int = 0
    queue_seconds: float | None = None  # until its prompt began to run; None: it never did
    first_token_seconds: float | None = None  # None: it put out nothing
    total_seconds: float = 0.0


@dataclass
class EngineStats(RoundFigures):
    """Running totals since the engine was made."""

    seconds: dict[Phase, float] = field(default_factory=dict)
    steps: int = 0  # decode rounds of a whole batch
    prompt_tokens: int = 0  # tokens that prefill ran, those of resumed requests counted
    output_tokens: int = 0
    looked_up_tokens: int = 0  # tokens to be known when prompts were begun or resumed ...
    cached_tokens: int = 0  # ... and those of them that the prefix cache held
    preemptions: int = 0

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the tokens to be known that the prefix cache held; None before the first prompt."""
        return self.cached_tokens / self.looked_up_tokens if self.looked_up_tokens else None

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True)
class EngineLoad:
    """What the engine holds between two steps."""

    running: int  # requests with blocks: prompts under way and decoding ones
    waiting: int  # requests in the queue, preempted ones counted
    free_blocks: int  # cache blocks nobody holds; some of them keep a prefix that may be asked for again
    cached_blocks: int  # those of the free blocks that keep one
    num_blocks: int  # all blocks, the reserved one left out


def _count(histogram: list[int], value: int) -> None:
    """Add one to a histogram at `value`."""
    histogram += [0] * (value + 1 - len(histogram))
    histogram[value] += 1


class AcceptanceWatch:
    """Warns once when the accepted length over the last 50 speculative rounds of the engine stays near 1."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, int]] = deque(maxlen=WATCHED_ROUNDS)
        self._warned = False

    def close(self) -> None:
        """Warn no more: what follows are no real requests."""
        self._warned = True

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
            "the drafter's accepted length is %.2f over %d rounds, so it slows decoding down: `dspark doctor` tells "
            "why. Usual causes: the slot convention (sample_from_anchor), target_layer_ids off by one, another target "
            "than the one it was trained for, a wrong mask_token_id",
            committed / requests,
            WATCHED_ROUNDS,
        )
