"""What both kinds of completion answer with: the envelope, the counts of tokens, the figures of speculation."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.engine.engine import StepOutput
from dspark.engine.request import Completion
from dspark.server.answers import Job

Json = dict[str, Any]


class Shape(Protocol):
    """How one kind of completion writes its choices."""

    kind: str  # the `object` of a whole answer
    chunk_kind: str  # and of a piece of a stream

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished choice."""

    def pieces(self, index: int, output: StepOutput) -> Iterator[Json]:
        """What one step adds to a choice, in chunks of a stream; the last one has the finish reason."""


@dataclass(frozen=True)
class Envelope:
    """What stands around the choices of one request."""

    identity: str
    model: str
    job: Job
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, shape: Shape, completions: Sequence[Completion]) -> Json:
        """A whole answer."""
        choices = [shape.choice(i, completion) for i, completion in enumerate(completions)]
        return self._around(shape.kind, choices) | {
            "usage": usage(self.job, completions),
            "speculative": figures(completions),
        }

    def chunk(self, shape: Shape, choices: list[Json]) -> Json:
        """A piece of a stream."""
        return self._around(shape.chunk_kind, choices)

    def _around(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage(job: Job, completions: Collection[Completion]) -> Json:
    """Tokens of the prompts, each counted once, and of the answers."""
    prompt = sum(len(ids) for ids in job.prompts)
    answer = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.figures.cached_tokens for completion in completions if completion.index == 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def figures(completions: Collection[Completion]) -> Json:
    """What speculation did for a request, over all its answers; times are in seconds since it was submitted."""
    each = [completion.figures for completion in completions]
    rounds, committed = sum(f.rounds for f in each), sum(f.committed for f in each)
    by_position = [0] * max((len(f.accepted_by_position) for f in each), default=0)
    for f in each:
        for i, count in enumerate(f.accepted_by_position):
            by_position[i] += count
    firsts = [f.first_token_seconds for f in each if f.first_token_seconds is not None]
    queues = [f.queue_seconds for f in each if f.queue_seconds is not None]
    return {
        "rounds": rounds,
        "proposed": sum(f.proposed for f in each),
        "drafted": sum(f.drafted for f in each),
        "accepted": sum(by_position),
        "accepted_by_position": by_position,
        "accepted_length": round(committed / rounds, 4) if rounds else None,
        "preemptions": sum(f.preemptions for f in each),
        "queue_seconds": _rounded(min(queues, default=None)),
        "first_token_seconds": _rounded(min(firsts, default=None)),
        "total_seconds": _rounded(max((f.total_seconds for f in each), default=None)),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
