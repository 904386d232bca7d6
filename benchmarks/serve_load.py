"""Throughput of one engine after the other on the same prompts: the part `load` of benchmarks/serve.py."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dspark.console.session import Session
from dspark.drafters.base import Drafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.profile import FULL, measure_costs, write_costs
from dspark.engine.request import SamplingParams
from dspark.log import progress

LEAST_REQUESTS = 4


class Pair(NamedTuple):
    """The models, and how the planner is set."""

    target_session: Session
    drafter: Drafter
    settings: EngineSettings
    costs: Path | None  # None: measured here


@dataclass
class Load:
    """What the engines made of one concurrency."""

    speeds: dict[str, list[float]] = field(default_factory=dict)  # tokens per second of each round
    planner_share: float = 0.0
    round_time_errors: list[float] = field(default_factory=list)
    drafted_share: float = 0.0  # of the planner's rounds, per request
    verify_length: float = 0.0  # rows, per request and round

    @property
    def best_static(self) -> str:
        """The static width of the highest median."""
        return max((name for name in self.speeds if name.startswith("static")), key=lambda name: self.median(name))

    def median(self, name: str) -> float:
        """Tokens per second."""
        return median(self.speeds[name])

    def over(self, name: str) -> float:
        """The planner / another engine in the same round, median over the rounds."""
        return median(a / b for a, b in zip(self.speeds["adaptive"], self.speeds[name], strict=True))

    def summary(self) -> dict[str, Any]:
        """For the reader of the figures."""
        return {
            "tokens_per_second": {name: self.median(name) for name in self.speeds},
            "over_plain": self.over("plain"),
            "over_best_static": self.over(self.best_static),
            "drafted_share": self.drafted_share,
            "verify_length": self.verify_length,
            "planner_share": self.planner_share,
            "round_time_error": median(self.round_time_errors),
        }


def measure_load(
    pair: Pair, prompts: list[list[int]], concurrency: list[int], widths: list[int] | None, tokens: int, rounds: int
) -> dict[int, Load]:
    """Every engine at every concurrency."""
    widths = widths or list(range(1, pair.drafter.config.num_drafts + 1))
    longest = max(map(len, prompts)) + tokens + 1
    loads = {}
    with tempfile.TemporaryDirectory() as folder:
        costs = pair.costs or Path(folder) / "costs.json"
        if pair.costs is None:
            measured = EngineSettings(max_batch=max(concurrency), max_length=2 * FULL.context)
            write_costs(costs, measure_costs(pair.target_session.target, pair.drafter, measured, FULL))
        with progress(len(concurrency) * (rounds + 1) * (len(widths) + 2), "load", "run") as bar:
            for size in concurrency:
                base = EngineSettings(max_batch=size, max_length=longest, prefix_cache=False)
                engines = engines_of(pair, base, widths, costs)
                loads[size] = Load({name: [] for name in engines})
                for number in range(-1, rounds):  # the first one warms up: the planner learns what drafts are worth
                    run_round(engines, loads[size], prompts, size, tokens, number)
                    bar.update(len(engines))
                read_figures(loads[size], engines["adaptive"])
    return loads


def engines_of(pair: Pair, base: EngineSettings, widths: list[int], costs: Path) -> dict[str, Engine]:
    """Plain decoding, the planner right behind it, where the machine is most alike, and each static width."""
    target = pair.target_session.target
    statics = {f"static {k}": Engine(target, pair.drafter, base.replace(num_draft_tokens=k)) for k in widths}
    plan = {
        "planner": pair.settings.planner, "costs": costs,
        "confidence_temperatures": pair.settings.confidence_temperatures,
    }  # fmt: skip
    return {
        "plain": Engine(target, None, base), "adaptive": Engine(target, pair.drafter, base.replace(**plan)), **statics,
    }  # fmt: skip


def run_round(
    engines: dict[str, Engine], load: Load, prompts: list[list[int]], size: int, tokens: int, number: int
) -> None:
    """Let every engine answer the same prompts, another engine first each time; round -1 is not counted."""
    count = max(LEAST_REQUESTS, 2 * size)
    first = (number + 1) * count
    chosen = [prompts[(first + i) % len(prompts)] for i in range(count)]
    lengths = answer_lengths(count, tokens)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    names = list(engines)
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
        start = time.perf_counter()
        engines[name].generate(chosen, params)
        if number >= 0:
            load.speeds[name].append(sum(lengths) / (time.perf_counter() - start))
    if number < 0:
        engines["adaptive"].stats.seconds.clear()


def answer_lengths(count: int, tokens: int) -> list[int]:
    """So many answers' lengths, evenly from half of `tokens` to one and a half, in an order that looks random.

    Were all alike, plain decoding would end whole batches at once and always run full ones, as no server does.
    """
    golden = (5**0.5 - 1) / 2
    return [max(1, round(tokens * (0.5 + (i * golden) % 1.0))) for i in range(count)]


def read_figures(load: Load, engine: Engine) -> None:
    """What the planner's engine counted; the warm-up's rounds are among those of which only shares are told."""
    stats = engine.stats
    spent = {name: seconds for name, seconds in stats.seconds.items() if name != "prefill"}
    load.planner_share = spent["plan"] / sum(spent.values())
    load.round_time_errors = engine.round_time_errors
    load.drafted_share = stats.proposed / engine.drafter.config.num_drafts / stats.rounds if engine.drafter else 0.0
    load.verify_length = 1 + stats.drafted / stats.rounds
