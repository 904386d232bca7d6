"""Two runs over the same prompts: differences and ratios of their figures, with the significance of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dspark.errors import DataError
from dspark.evaluation.results import Run
from dspark.evaluation.rows import Row, Setting
from dspark.evaluation.stats import Array, Estimate, add_up, interval, ratios, resample, total
from dspark.evaluation.summary import ALL, settings_of

METRICS = ("tau", "acceptance_rate", "speedup")
MIN_PROMPTS = 6  # the least n with 2 ** (1 - n) < 0.05, the p-value of a sign test


class Difference(NamedTuple):
    """One figure of two runs over the prompts of a group that both answered."""

    setting: Setting
    group: str  # a task, a category or all
    metric: str
    prompts: int
    first: float
    second: float
    difference: Estimate  # second - first
    ratio: Estimate  # second / first
    p_value: float  # of no difference, two-sided

    @property
    def is_significant(self) -> bool:
        """Whether the difference stands out from the draw of the prompts, at 5 per cent.

        Never of fewer than six prompts: even if all agreed, their signs alone would reach no 5 per cent.
        """
        return self.prompts >= MIN_PROMPTS and self.p_value < 0.05


class Comparison(NamedTuple):
    """The second run against the first."""

    first: str
    second: str
    differences: list[Difference]
    unpaired: int  # answers of one run that the other lacks; they do not count


def compare(first: Run, second: Run) -> Comparison:
    """Compare two runs, paired by prompt and setting. Raises `DataError` when they cannot be compared."""
    check_comparable(first, second)
    sides = [run.drafted() for run in (first, second)]
    common = [pair for pair in sides[0] if pair in sides[1]]
    if not common:
        raise DataError(f"{second.name}: has no prompt and setting in common with {first.name}: measure the same tasks")
    differences = []
    for setting in settings_of(sides[0][pair] for pair in common):
        pairs = [(sides[0][pair], sides[1][pair]) for pair in common if pair[1] == setting]
        for name, group in _groups(pairs).items():
            differences += _differences(setting, name, group, (first, second))
    return Comparison(first.name, second.name, differences, len(sides[0]) + len(sides[1]) - 2 * len(common))


def check_comparable(first: Run, second: Run) -> None:
    """Raise `DataError` where the two runs did not ask the same of the same target."""
    for key in ("target_digest", "chat_template_digest", "tokens", "seed"):
        if first.stamp.get(key) != second.stamp.get(key):
            raise DataError(
                f"{second.name}: {key} is {second.stamp.get(key)}, and {first.stamp.get(key)} in {first.name}: "
                "measure both alike"
            )


Pairs = list[tuple[Row, Row]]


def _groups(pairs: Pairs) -> dict[str, Pairs]:
    """By task, by category, and all; what holds a single part is not told twice."""
    tasks = {a.task: a.category for a, _ in pairs}
    categories = dict.fromkeys(tasks.values())
    found = {name: [pair for pair in pairs if pair[0].task == name] for name in tasks}
    for name in categories:
        if list(tasks.values()).count(name) > 1:
            found[name] = [pair for pair in pairs if pair[0].category == name]
    return found | ({ALL: pairs} if len(categories) > 1 else {})


def _differences(setting: Setting, name: str, pairs: Pairs, runs: tuple[Run, Run]) -> list[Difference]:
    sums = [add_up([pair[side] for pair in pairs], runs[side].plain()) for side in (0, 1)]
    weights = resample([a.task for a, _ in pairs])  # one draw of prompts, for both
    points = [ratios(total(part, np.ones((1, len(pairs))))) for part in sums]
    drawn = [ratios(total(part, weights)) for part in sums]
    found = []
    for metric in METRICS:
        values = [float(point[metric][0]) for point in points]
        if np.isfinite(values).all():
            found.append(_difference(setting, name, metric, values, [part[metric] for part in drawn], len(pairs)))
    return found


def _difference(
    setting: Setting, name: str, metric: str, values: list[float], drawn: list[Array], prompts: int
) -> Difference:
    gap, quotient = drawn[1] - drawn[0], drawn[1] / np.where(drawn[0] > 0, drawn[0], np.nan)
    first, second = values
    ratio = second / first if first > 0 else float("nan")
    estimates = interval(second - first, gap, prompts), interval(ratio, quotient, prompts)
    return Difference(setting, name, metric, prompts, first, second, *estimates, p_value(gap))


def p_value(gap: Array) -> float:
    """Two-sided p-value of resampled differences [R]: twice the smaller share beyond zero, never below 2 / (R + 1).

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 15: the achieved significance level, here of
    the interval that just touches zero.
    """
    known = gap[np.isfinite(gap)]
    sides = [(1 + int((known <= 0).sum())) / (len(known) + 1), (1 + int((known >= 0).sum())) / (len(known) + 1)]
    return min(1.0, 2 * min(sides))
