"""What the endpoints share: one model, its engine, and the figures of both."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dspark.engine.engine import Engine, StepOutput
from dspark.engine.request import SamplingParams
from dspark.engine.runner import num_window_positions
from dspark.engine.stats import EngineLoad
from dspark.models.tokenizer import Tokenizer
from dspark.server.config import ServeSettings
from dspark.server.engine_thread import EngineThread
from dspark.server.errors import ApiError, bad_request
from dspark.server.metrics import EngineCollector, Metrics
from dspark.server.prompts import check_length
from dspark.server.rounds import RoundFeed

T = TypeVar("T")

_LONG_TEXT = 1 << 14  # characters: more are tokenised away from the event loop
_LONGEST_RETRY = 60  # seconds


class Service:
    """One model, served."""

    def __init__(self, settings: ServeSettings, engine: Engine) -> None:
        self.settings = settings
        self.engine = EngineThread(engine, self._take_step)
        self.metrics = Metrics()
        self.rounds = RoundFeed(settings.round_events)
        self.metrics.registry.register(EngineCollector(self))
        self.started_at = int(time.time())
        self.draining = False
        self.num_requests = 0  # HTTP requests for answers that are under way
        self._aside = asyncio.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self.engine.engine.target.tokenizer

    @property
    def limit(self) -> int:
        """Tokens of prompt and answer together: what the model holds, or the whole cache if that is less."""
        engine = self.engine.engine
        in_cache = self.engine.load.num_blocks * engine.settings.block_size - num_window_positions(engine.drafter)
        return min(engine.limit, in_cache)

    @property
    def max_draft(self) -> int:
        """Drafts that a round may verify; 0 without a drafter."""
        drafter, limit = self.engine.engine.drafter, self.engine.engine.settings.num_draft_tokens
        return 0 if drafter is None else min(drafter.num_drafts, limit or drafter.num_drafts)

    @property
    def retry_seconds(self) -> int:
        """When a request that found the queue full may find a place: a guess from the answers before it."""
        load = self.engine.load
        places = self.engine.engine.settings.max_batch
        return max(1, min(_LONGEST_RETRY, math.ceil(self.metrics.mean_seconds * load.waiting / places)))

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end an answer, and are no text of it."""
        own = () if params.ignore_eos else self.engine.engine.eos_token_ids
        return frozenset((*params.stop_token_ids, *own))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model than the one served."""
        if name is not None and name != self.settings.name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; this server has {self.settings.name!r}",
                "model",
                "model_not_found",
            )

    def check_prompts(self, prompts: Sequence[list[int]], n: int | None, param: str) -> None:
        """Raise ApiError for a prompt that is empty or too long, or more answers than one request may ask for."""
        for prompt in prompts:
            check_length(prompt, self.limit, param)
        num_answers, limit = len(prompts) * (n or 1), self.settings.limits.max_answers
        if num_answers > limit:
            raise bad_request(f"n: {num_answers} answers are more than the {limit} that a request may have", "n")

    async def aside(self, work: Callable[[], T], size: int) -> T:
        """Do what takes time in proportion to `size` characters, away from the event loop if they are many."""
        if size < _LONG_TEXT:
            return work()
        async with self._aside:  # one at a time: the engine needs the processor more
            return await asyncio.to_thread(work)

    def _take_step(self, outputs: list[StepOutput], load: EngineLoad) -> None:
        """A step is over."""
        for output in outputs:
            if output.completion is not None:
                self.metrics.count_answer(output.completion)
        self.rounds.take(outputs, load)
