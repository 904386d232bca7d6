"""The last rounds, for whoever watches: kept as the engine gives them, and written out only when somebody reads."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from dspark.engine.engine import StepOutput
from dspark.engine.stats import EngineLoad

MAX_WATCHERS = 16
_BACKLOG = 256  # steps that a slow watcher may lag behind before it misses some


class StepRounds(NamedTuple):
    """The rounds of one step, one a request."""

    step: int
    at: float  # seconds since 1970
    outputs: list[StepOutput]  # those with a round
    load: EngineLoad

    @property
    def budget(self) -> int:
        """Drafts verified, over all requests."""
        return sum(output.round.verify_len - 1 for output in self.outputs if output.round is not None)

    def events(self) -> list[dict[str, Any]]:
        """One object a request."""
        return [self._event(output) for output in self.outputs]

    def _event(self, output: StepOutput) -> dict[str, Any]:
        record = output.round
        assert record is not None
        return {
            "step": self.step,
            "time": round(self.at, 4),
            "request": output.request_id,
            "index": output.index,
            "position": record.position,
            "drafted": record.num_drafts,
            "verified": record.verify_len - 1,
            "accepted": record.correct_len,
            "output": record.num_output,
            "bonus": "bonus" in output.origins,
            "confidence": [round(0.5 + 0.5 * math.tanh(logit / 2), 4) for logit in record.confidence_logits],
            "budget": self.budget,
            "running": self.load.running,
            "waiting": self.load.waiting,
        }


class RoundFeed:
    """Keeps the rounds of the last steps, and hands new ones to its watchers. Lives on the event loop."""

    def __init__(self, num_kept: int) -> None:
        self.recent: deque[StepRounds] = deque(maxlen=num_kept)
        self.last_budget = 0
        self._num_steps = 0
        self._watchers: set[asyncio.Queue[StepRounds | None]] = set()

    @property
    def num_watchers(self) -> int:
        """Who reads now."""
        return len(self._watchers)

    def take(self, outputs: list[StepOutput], load: EngineLoad) -> None:
        """A step is over."""
        decoded = [output for output in outputs if output.round is not None]
        if not decoded:
            return
        self._num_steps += 1
        rounds = StepRounds(self._num_steps, time.time(), decoded, load)
        self.last_budget = rounds.budget
        self.recent.append(rounds)
        for watcher in self._watchers:
            if watcher.full():
                watcher.get_nowait()
            watcher.put_nowait(rounds)

    async def watch(self, num_past: int) -> AsyncIterator[StepRounds]:
        """The last `num_past` steps, then every step from now on, until the feed is closed."""
        watcher: asyncio.Queue[StepRounds | None] = asyncio.Queue(_BACKLOG)
        past = list(self.recent)[-num_past:] if num_past else []
        self._watchers.add(watcher)
        try:
            for rounds in past:
                yield rounds
            while (new := await watcher.get()) is not None:
                yield new
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """Send the watchers home."""
        for watcher in self._watchers:
            if watcher.full():
                watcher.get_nowait()
            watcher.put_nowait(None)
