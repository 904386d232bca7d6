"""What rounds take on this machine: measured on made-up requests, fitted, and kept in a JSON file.

Shapes: R requests, M rows.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from dspark.drafters.base import Drafter
from dspark.engine.calls import Line
from dspark.engine.config import EngineSettings
from dspark.engine.grammar import Grammars
from dspark.engine.parallel import make_runner
from dspark.engine.planning import Planner
from dspark.engine.request import Request, SamplingParams
from dspark.engine.round import Round
from dspark.engine.runner import num_window_positions
from dspark.engine.stats import EngineStats
from dspark.engine.text import TextStream
from dspark.errors import ConfigError
from dspark.files import atomic_path
from dspark.log import get_logger, progress
from dspark.models.target import Target
from dspark.spec.cost import AdditiveProfile, Curve, DiagonalProfile, Lines, RoundCosts, profile_dict
from dspark.spec.online import OnlineCosts

_FIT_PASSES = 200

_log = get_logger(__name__)


class Effort(NamedTuple):
    """How thoroughly costs are measured."""

    warm_up: int  # rounds whose time is not taken
    rounds: int  # rounds of which the median is taken
    widths: int  # numbers of rows a request, between 1 and the whole block, at most
    context: int  # tokens before the anchor


QUICK = Effort(warm_up=1, rounds=3, widths=3, context=128)
FULL = Effort(warm_up=2, rounds=7, widths=5, context=256)


class Sample(NamedTuple):
    """The median time of rounds of one kind."""

    num_requests: int
    num_drafting: int
    num_rows: int
    draft_seconds: float
    other_seconds: float


def measure_costs(
    target: Target, drafter: Drafter, settings: EngineSettings, effort: Effort = FULL, line: Line | None = None
) -> RoundCosts:
    """Measure rounds of 1 to `max_batch` requests, plain and with drafts, and fit tables to them."""
    samples = list(measure(target, drafter, settings, effort, line))
    plain = {s.num_requests: s.other_seconds for s in samples if not s.num_drafting}
    speculative = [s for s in samples if s.num_drafting]
    draft: dict[int, list[float]] = {}
    for sample in speculative:
        draft.setdefault(sample.num_drafting, []).append(sample.draft_seconds)
    return RoundCosts(
        fit_additive(speculative),
        Curve(tuple(sorted(draft)), tuple(median(draft[count]) for count in sorted(draft))),
        Curve(tuple(sorted(plain)), tuple(plain[count] for count in sorted(plain))),
        circumstances(target, drafter)
        | {"context": effort.context, "num_drafts": max(s.num_rows // s.num_requests for s in speculative) - 1},
    )


def circumstances(target: Target, drafter: Drafter) -> dict[str, Any]:
    """What costs hold for."""
    return {
        "target": target.digest,
        "drafter": drafter.digest,
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def measure(
    target: Target, drafter: Drafter, settings: EngineSettings, effort: Effort, line: Line | None = None
) -> Iterator[Sample]:
    """Time rounds over a grid of requests and rows, on a cache of their own that holds zeros."""
    settings = settings.replace(planner="static", record_rounds=False)
    window = num_window_positions(drafter)
    blocks = settings.blocks_for(effort.context + window)
    runner = make_runner(line, target.decoder, drafter, settings, 1 + settings.max_batch * blocks)
    stats = EngineStats()
    planner = Planner("static", runner.num_drafts, settings.max_batch, None, has_confidence=False)
    rounds = Round(runner, planner, stats, settings, Grammars(target))
    rounds.watch.close()
    grid = [(size, lens) for size in sizes(settings.max_batch) for lens in widths(size, runner.num_drafts + 1, effort)]
    with progress(len(grid), "cost of rounds", "kind") as bar, torch.inference_mode():
        for size, lens in grid:
            tables = [list(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(size)]
            times = []
            for _ in range(effort.warm_up + effort.rounds):
                requests = [
                    made_up(i, effort.context, lens[i], tables[i], target.config.vocab_size) for i in range(size)
                ]
                drafted, begun = stats.seconds.get("draft", 0.0), time.perf_counter()
                rounds.decode(requests)
                total = time.perf_counter() - begun
                drafting = stats.seconds["draft"] - drafted if max(lens) > 1 else 0.0
                times.append((drafting, total - drafting))
            draft, other = (median(column) for column in zip(*times[effort.warm_up :], strict=True))
            yield Sample(size, sum(width > 1 for width in lens), sum(lens), draft, other)
            bar.update(1)


def sizes(max_batch: int) -> list[int]:
    """Numbers of requests to measure: the powers of two, and the largest."""
    return sorted({1 << power for power in range(max_batch.bit_length())} | {max_batch})


def widths(num_requests: int, num_rows: int, effort: Effort) -> list[list[int]]:
    """Verify lengths of a batch to measure: all 1 (plain), then unequal ones, more and more, up to whole blocks."""
    draw = random.Random(num_requests)
    batches = [[1] * num_requests]
    for step in range(1, effort.widths):
        total = num_requests + round(num_requests * (num_rows - 1) * step / (effort.widths - 1))
        lens = [2] * num_requests  # every one has drafts
        while sum(lens) < total:
            place = draw.randrange(num_requests)
            lens[place] += lens[place] < num_rows
        batches.append(lens)
    return batches


def made_up(number: int, context: int, num_rows: int, block_table: list[int], vocab_size: int) -> Request:
    """A greedy request in the midst of its answer that wants `num_rows` more tokens, so that so many rows run."""
    prompt_ids = [(number * 7919 + i * 104729) % vocab_size for i in range(context)]
    return Request(
        request_id=f"made-up-{number}",
        prompt_ids=prompt_ids,
        params=SamplingParams(max_tokens=num_rows + 1, ignore_eos=True),
        seed=number,
        limit=context + num_rows + 1,
        stop_token_ids=frozenset(),
        stream=TextStream(lambda ids: ""),
        speculates=True,
        token_ids=[number % vocab_size],
        origins=["prefill"],
        block_table=block_table,
        seq_len=context,
    )


def fit_additive(samples: list[Sample]) -> AdditiveProfile:
    """bias + alpha(R) + theta(M), both monotone, of the least squared relative error: backfitting (Hastie and
    Tibshirani, 1986) with isotonic steps."""
    seconds = np.array([s.other_seconds for s in samples])
    weight = seconds**-2.0
    axes = [np.array([s.num_requests for s in samples]), np.array([s.num_rows for s in samples])]
    probes = [np.unique(axis) for axis in axes]
    places = [np.searchsorted(probe, axis) for probe, axis in zip(probes, axes, strict=True)]
    parts = [np.zeros(len(probe)) for probe in probes]
    bias = float(np.average(seconds, weights=weight))
    for _ in range(_FIT_PASSES):
        for i in (1, 0):
            left = seconds - bias - parts[1 - i][places[1 - i]]
            total = np.bincount(places[i], weight)
            parts[i] = isotonic(np.bincount(places[i], weight * left) / total, total)
            bias += float(parts[i][0])
            parts[i] -= parts[i][0]
    alpha, theta = parts
    return AdditiveProfile(
        bias, tuple(probes[0].tolist()), tuple(alpha.tolist()), tuple(probes[1].tolist()), tuple(theta.tolist())
    )


def isotonic(values: ndarray, weights: ndarray) -> ndarray:
    """The closest values that never fall, by pooling neighbours that do."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


class Profiled(NamedTuple):
    """Measured costs, and the file that they went to."""

    costs: RoundCosts
    max_batch: int
    num_drafts: int
    path: Path

    def seconds(self, num_requests: int, rows: int) -> float:
        """Of a round with drafts for all, or without (rows = num_requests)."""
        drafting = num_requests if rows > num_requests else 0
        return float(self.costs.seconds(num_requests, np.array([drafting]), np.array([rows]))[0])

    def draft_seconds(self, num_requests: int) -> float:
        """Of drafting alone."""
        return 0.0 if self.costs.draft is None else float(self.costs.draft.at(np.array([num_requests]))[0])


def additive_of(costs: RoundCosts, max_batch: int, num_rows: int) -> AdditiveProfile:
    """The same costs with drafting counted in, `max_batch` requests at most; num_rows as for `diagonal_of`."""
    assert isinstance(costs.verify, AdditiveProfile)
    verify, batch = costs.verify, np.array(sizes(max_batch))
    alpha = Lines(verify.bs_probes, verify.alpha_seconds).at(batch)
    if costs.draft is not None:
        alpha = alpha + costs.draft.at(batch)
    return replace(verify, bs_probes=tuple(batch.tolist()), alpha_seconds=tuple(alpha.tolist()))


def diagonal_of(costs: RoundCosts, max_batch: int, num_rows: int) -> DiagonalProfile:
    """The same costs by rows alone: batches of full requests, `num_rows` rows each, drafting counted in."""
    batch = np.array(sizes(max_batch))
    steps = [
        1 / float(costs.seconds(size, np.array([size]), np.array([size * num_rows]))[0]) for size in batch.tolist()
    ]
    return DiagonalProfile(tuple((batch * num_rows).tolist()), tuple(steps), max_batch * num_rows)


def write_costs(path: str | Path, costs: RoundCosts | DiagonalProfile | AdditiveProfile) -> None:
    """Write costs as JSON; a profile alone in exactly the shape that SGLang reads."""
    data = costs.to_dict() if isinstance(costs, RoundCosts) else profile_dict(costs)
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_costs(path: str | Path) -> RoundCosts:
    """Read a file of `write_costs`, or an SPS table of SGLang. Raises ConfigError."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"costs {path}: cannot be read ({error.strerror}); measure with `dspark profile`") from None
    except ValueError as error:
        raise ConfigError(f"costs {path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"costs {path}: not a JSON object")
    costs = RoundCosts.from_dict(data, f"costs {path}")
    if costs.verify.is_flat:
        _log.warning("costs %s: more rows cost nothing in this table, so nothing will be trimmed: measure again", path)
    return costs


def costs_of(
    settings: EngineSettings, target: Target, drafter: Drafter | None, line: Line | None = None
) -> OnlineCosts | None:
    """The costs that the settings ask for; None where no plan needs them or none are named. Raises ConfigError."""
    if settings.planner == "static" or drafter is None or settings.costs is None:
        return None
    if settings.costs == "measure":
        return OnlineCosts(measure_costs(target, drafter, settings, QUICK, line))
    costs, now = read_costs(settings.costs), circumstances(target, drafter)
    other = [name for name, value in now.items() if costs.measured.get(name, value) != value]
    if other:
        names = ", ".join(other)
        _log.warning("costs %s: measured with other %s: run `dspark profile` again for these", settings.costs, names)
    return OnlineCosts(costs)
