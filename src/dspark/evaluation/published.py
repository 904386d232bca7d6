"""Published figures of adaptive verification, the costs that follow from them, and how close a simulation comes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

import numpy as np

from dspark.evaluation.acceptance import GivenAcceptance, constant_chance
from dspark.spec.cost import AdditiveProfile, Curve, Lines, RoundCosts

# With chances this spread out a confidence above .8 leaves drafts that are accepted 92 to 96 times in 100, as the
# paper's threshold sweep reports.
CONCENTRATION = 1.0


@dataclass(frozen=True)
class Published:
    """Tokens a second by concurrent requests, and accepted lengths by area."""

    num_drafts: int
    concurrency: tuple[int, ...]
    plain: tuple[float, ...]
    fixed: tuple[float, ...]  # all drafts verified
    adaptive: tuple[float, ...]
    accepted_length: Mapping[str, Sequence[float]]
    rows_at_low_load: float  # verified per request and round; of another deployment

    @classmethod
    def load(cls) -> Published:
        """The figures that are shipped."""
        text = resources.files("dspark").joinpath("evaluation", "curves", "published.json").read_text(encoding="utf-8")
        data = json.loads(text)
        return cls(
            num_drafts=data["num_drafts"],
            concurrency=tuple(data["concurrency"]),
            plain=tuple(data["plain"]),
            fixed=tuple(data["fixed"]),
            adaptive=tuple(data["adaptive"]),
            accepted_length=data["accepted_length"],
            rows_at_low_load=data["rows_at_low_load"],
        )

    def acceptance(self) -> GivenAcceptance:
        """Requests of the three areas in equal parts, with the accepted lengths of the paper's Table 1."""
        lengths = [sum(values) / len(values) for values in self.accepted_length.values()]
        chances = [[constant_chance(length, self.num_drafts)] * self.num_drafts for length in lengths]
        return GivenAcceptance(chances, CONCENTRATION)

    def costs(self) -> RoundCosts:
        """Costs of rounds from the plain and the fixed column alone.

        At C requests a plain step takes C / plain and has C rows; a round that verifies all drafts takes C * tau /
        fixed, tau being the accepted length. Where the latter has no more rows than the largest plain step, the plain
        steps tell what its verification takes: what is over is drafting, which is taken to cost the same at any load.
        With that known, the larger rounds tell what more rows take.
        """
        tau = self.acceptance().accepted_length()
        sizes = np.array(self.concurrency)
        steps, rounds = sizes / np.array(self.plain), sizes * tau / np.array(self.fixed)
        rows = sizes * (self.num_drafts + 1)
        known = rows <= sizes[-1]
        over = rounds[known] - Lines(sizes.tolist(), steps.tolist()).at(rows[known])
        draft = float(np.average(over, weights=rounds[known] ** -2.0))  # of the least squared relative error
        probes = tuple(int(count) for count in (*sizes, *rows[~known]))
        seconds = tuple(float(value) for value in (*steps, *(rounds[~known] - draft)))
        verify = AdditiveProfile(seconds[0], (1,), (0.0,), probes, tuple(value - seconds[0] for value in seconds))
        return RoundCosts(verify, Curve((1,), (draft,)))

    def shape_error(self, plain: Sequence[float], fixed: Sequence[float], adaptive: Sequence[float]) -> float:
        """How far a simulation at the same concurrencies is off: the worse of two.

        The largest relative error of adaptive throughput's ratios between neighbouring concurrencies; and the largest
        share by which adaptive throughput stays below that of plain decoding or of full verification.
        """
        ratios = _ratios(adaptive), _ratios(self.adaptive)
        steps = [abs(simulated / published - 1) for simulated, published in zip(*ratios, strict=True)]
        below = [1 - a / max(p, f) for p, f, a in zip(plain, fixed, adaptive, strict=True)]
        return max(*steps, *below)


def _ratios(rates: Sequence[float]) -> list[float]:
    return [after / before for before, after in pairwise(rates)]
