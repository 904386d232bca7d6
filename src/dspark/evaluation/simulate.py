"""The planner against costs and an acceptance model, on a clock of its own: no model is run.

Shapes: R requests of a round, b of them drafted for, G drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from dspark.drafters.layouts.calibration import Calibration
from dspark.engine.planning import Planner
from dspark.engine.profile import read_costs
from dspark.evaluation.acceptance import Acceptance, GivenAcceptance, RecordedAcceptance
from dspark.evaluation.config import SimulateOptions
from dspark.evaluation.load_model import Load, Simulated
from dspark.evaluation.published import Published
from dspark.log import progress
from dspark.spec.cost import RoundCosts
from dspark.spec.online import OnlineCosts

Policy = Literal["plain", "fixed", "early_stop", "lagged"]
POLICIES: tuple[Policy, ...] = ("plain", "fixed", "early_stop", "lagged")
_WARM_UP = 0.3  # of the rounds is not counted
_LIVES = 5  # requests served for each that is decoded at a time, at least


class Scene(NamedTuple):
    """What a simulation is of."""

    costs: RoundCosts
    acceptance: Acceptance
    temperatures: tuple[float, ...] | None  # of the confidence logits


@dataclass(frozen=True)
class Point:
    """What one policy made of one load."""

    policy: Policy
    arrivals: float | None  # requests a second; None: so many requests at any time
    concurrency: float  # requests decoded together, averaged over time
    tokens_per_second: float
    user_tokens_per_second: float  # of each request while it is decoded
    verify_budget: float  # drafts verified, per request and round
    drafted_share: float  # requests that were drafted for, per request and round
    accepted_length: float  # tokens, per request and round
    wait_seconds: float  # of a request until it is decoded; it goes on rising where more come than can be served


class Totals(NamedTuple):
    """One round."""

    seconds: float
    requests: int
    drafting: int
    drafts: int
    tokens: int


class Simulation:
    """One policy under one load."""

    def __init__(self, policy: Policy, scene: Scene, load: Load, seed: int) -> None:
        self.policy, self.costs, self.acceptance, self.load = policy, scene.costs, scene.acceptance, load
        self.clock = 0.0
        self.num_served = 0
        self.active: list[Simulated] = []
        self._draw = np.random.default_rng(seed)
        adapts = policy in ("early_stop", "lagged")
        self.planner = Planner(
            policy if policy in ("early_stop", "lagged") else "static",
            scene.acceptance.num_drafts,
            load.most,
            OnlineCosts(scene.costs) if adapts else None,
            has_confidence=scene.acceptance.has_confidence,
            temperatures=scene.temperatures,
            clock=lambda: self.clock,
        )

    def round(self) -> Totals:
        """Run one."""
        self.clock = self.load.admit(self.active, self.clock)
        size, longest = len(self.active), 1 if self.policy == "plain" else self.acceptance.num_drafts + 1
        begun = self.planner.begin(self.active, np.full(size, longest), np.zeros(size, dtype=bool))
        requests, count = [self.active[i] for i in begun.order], begun.num_drafting
        sorts = np.array([request.sort for request in requests[:count]], dtype=np.int64)
        logits, correct_len = self.acceptance.rounds(sorts, self._draw)
        planned = self.planner.plan(begun, None if logits is None else torch.from_numpy(logits))
        correct_len = np.minimum(correct_len, planned.verify_lens[:count] - 1)
        rows = int(planned.verify_lens.sum())
        seconds = float(self.costs.seconds(size, np.array([count]), np.array([rows]))[0])
        self.clock += seconds
        self.planner.end(planned, correct_len, rows)
        tokens = self._commit(requests, [*(correct_len + 1).tolist(), *[1] * (size - count)])
        return Totals(seconds, size, count, rows - size, tokens)

    def _commit(self, requests: list[Simulated], each: list[int]) -> int:
        """Put tokens out; requests that are done leave."""
        tokens = 0
        for request, number in zip(requests, each, strict=True):
            tokens += min(number, request.left)
            request.left -= min(number, request.left)
            if not request.left:
                self.planner.release(request)
                self.num_served += 1
        self.active = [request for request in self.active if request.left]
        return tokens


def simulate_point(
    policy: Policy, scene: Scene, options: SimulateOptions, arrivals: float | None, concurrency: int
) -> Point:
    """Averages over the rounds of one policy under one load, the first of them left out.

    arrivals: requests a second, served up to `concurrency` at a time; None keeps so many at any time.
    """
    load = Load(scene.acceptance, options.length, arrivals, concurrency, options.seed)
    simulation = Simulation(policy, scene, load, options.seed)
    rounds = []
    while simulation.num_served < max(options.requests, _LIVES * len(simulation.active)):
        rounds.append(simulation.round())
    seconds, sizes, counts, drafts, tokens = np.array(rounds[int(_WARM_UP * len(rounds)) :]).T
    busy = float(seconds @ sizes)  # request-seconds
    return Point(
        policy,
        arrivals,
        concurrency=busy / float(seconds.sum()),
        tokens_per_second=float(tokens.sum() / seconds.sum()),
        user_tokens_per_second=float(tokens.sum()) / busy,
        verify_budget=float(drafts.sum() / sizes.sum()),
        drafted_share=float(counts.sum() / sizes.sum()),
        accepted_length=float(tokens.sum() / sizes.sum()),
        wait_seconds=float(np.mean(load.waits)) if load.waits else 0.0,
    )


def open_scene(options: SimulateOptions) -> Scene:
    """Costs and acceptance as the options name them. Raises ConfigError, CheckpointError or DataError."""
    published = Published.load()
    acceptance: Acceptance = published.acceptance()
    if options.acceptance is not None:
        acceptance = RecordedAcceptance.read(options.acceptance)
    elif options.chances:
        acceptance = GivenAcceptance([options.chances], options.concentration)
    costs = published.costs() if options.costs is None else read_costs(options.costs)
    calibration = options.calibration and Calibration.read_any(options.calibration)
    return Scene(costs, acceptance, calibration.temperatures if calibration else None)


def simulate(options: SimulateOptions) -> list[Point]:
    """Every policy under every load. Raises ConfigError or DataError."""
    scene = open_scene(options)
    plain = scene.costs.plain
    sizes = options.concurrency or (Published.load().concurrency if plain is None else plain.bs_probes)
    loads: list[tuple[float | None, int]] = [(None, size) for size in sizes]
    loads += [(rate, options.max_batch) for rate in options.arrivals]
    points = []
    with progress(len(loads) * len(POLICIES), "simulation", "point") as bar:
        for arrivals, concurrency in loads:
            for policy in POLICIES:
                points.append(simulate_point(policy, scene, options, arrivals, concurrency))
                bar.update(1)
    return points


def simulated_shape_error(options: SimulateOptions | None = None) -> float:
    """`Published.shape_error` of the lagged planner on the published curve. Of the options the seed, and how long."""
    options = options or SimulateOptions()
    published = Published.load()
    scene = Scene(published.costs(), published.acceptance(), None)
    points = [
        simulate_point(policy, scene, options, None, size)
        for policy in ("plain", "fixed", "lagged")
        for size in published.concurrency
    ]
    return shape_error(points, published)


def shape_error(points: Sequence[Point], published: Published) -> float:
    """`Published.shape_error` of points at the published concurrencies, the lagged planner as the adaptive one."""
    rates = [[point.tokens_per_second for point in by_policy(points, p)] for p in ("plain", "fixed", "lagged")]
    return published.shape_error(*rates)


def by_policy(points: Iterable[Point], policy: str) -> list[Point]:
    """The points of one policy."""
    return [point for point in points if point.policy == policy]
