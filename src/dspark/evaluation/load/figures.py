"""What a load came to: throughput, each user's speed, latencies, accepted length, verify budget; the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.evaluation.load.rows import Asked, LoadRow

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles; None where there is nothing to take them of."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of some values, interpolated between neighbours."""
        if not values:
            return cls(None, None, None, None)
        return cls(float(np.mean(values)), *(float(p) for p in np.percentile(values, PERCENTILES)))


@dataclass(frozen=True)
class LoadFigures:
    """One mode under one load. Times in seconds, speeds in tokens a second; failed requests count as failed only."""

    series: str
    load: str
    concurrency: int | None
    arrivals: float | None
    requests: int
    failed: int
    refused: int  # of the failed: the server said no
    active: float  # requests under way, averaged over time
    tokens_per_second: float  # of all, from the first request sent to the last answer's end
    requests_per_second: float
    user_tokens_per_second: Spread  # after the first piece of text
    first_token: Spread  # seconds from when the request was due
    between_pieces: Spread  # from each piece of text to the next; a piece may hold several tokens
    whole: Spread  # seconds until the last token
    sent_late: Spread  # seconds after a request was due; in a closed loop none is due before it is sent
    answer_tokens: float  # on average
    accepted_length: float | None  # tau
    verify_budget: float | None  # drafts verified, per request and round


def figures(row: LoadRow) -> LoadFigures:
    """The figures of a row."""
    done = [asked for asked in row.requests if asked.error is None]
    begun, ended = min(asked.sent for asked in row.requests), max(asked.ended for asked in row.requests)
    seconds, tokens = ended - begun, sum(asked.num_tokens for asked in done)
    accepted_length, verify_budget = speculation(row)
    return LoadFigures(
        row.series,
        row.load,
        row.concurrency,
        row.arrivals,
        requests=len(row.requests),
        failed=len(row.requests) - len(done),
        refused=sum(asked.refused for asked in row.requests),
        active=sum(asked.ended - asked.sent for asked in row.requests) / seconds,
        tokens_per_second=tokens / seconds,
        requests_per_second=len(done) / seconds,
        user_tokens_per_second=Spread.of([speed for asked in done if (speed := user_speed(asked)) is not None]),
        first_token=Spread.of([asked.pieces[0] - asked.arrived for asked in done if asked.pieces]),
        between_pieces=Spread.of([gap for asked in done for gap in np.diff(asked.pieces).tolist()]),
        whole=Spread.of([asked.ended - asked.arrived for asked in done]),
        sent_late=Spread.of([asked.sent - asked.arrived for asked in row.requests]),
        answer_tokens=tokens / len(done),
        accepted_length=accepted_length,
        verify_budget=verify_budget,
    )


def user_speed(asked: Asked) -> float | None:
    """Tokens a second from the first piece of text to the last; None where there is no time between.

    The first piece is taken for one token, the one that comes with the prompt.
    """
    seconds = asked.pieces[-1] - asked.pieces[0] if asked.pieces else 0.0
    return (asked.num_tokens - 1) / seconds if seconds > 0 else None


def speculation(row: LoadRow) -> tuple[float | None, float | None]:
    """tau and verify budget: as a dspark server tells of each request, else by the counters of /metrics, else None.

    By the counters tau is 1 + accepted / rounds, which counts tokens that a stop cut off as put out.
    """
    told = [asked.speculative for asked in row.requests if asked.speculative is not None]
    if told:
        rounds = sum(one["rounds"] for one in told)
        committed = sum(one["rounds"] * one["accepted_length"] for one in told if one["rounds"])
        return (committed / rounds, sum(one["drafted"] for one in told) / rounds) if rounds else (None, None)
    if row.counters is None or not row.counters["rounds"]:
        return None, None
    rounds = row.counters["rounds"]
    return 1 + row.counters["accepted"] / rounds, row.counters["drafted"] / rounds


def pareto(points: Sequence[LoadFigures]) -> list[LoadFigures]:
    """The points that no other beats in throughput and median user speed both, the fastest for a user first."""
    known = [point for point in points if point.user_tokens_per_second.p50 is not None]
    front: list[LoadFigures] = []
    for point in sorted(known, key=lambda p: (-(p.user_tokens_per_second.p50 or 0.0), -p.tokens_per_second)):
        if not front or point.tokens_per_second > front[-1].tokens_per_second:
            front.append(point)
    return front
