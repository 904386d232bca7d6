"""A planted difference is found, and none between equals."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.errors import DataError
from dspark.evaluation.compare import Difference, compare, p_value

from .made_rows import GREEDY, SAMPLED, made_run

CHANCES = (0.8, 0.7, 0.5, 0.6)


def taus(differences: list[Difference]) -> dict[tuple[str, float], Difference]:
    return {(d.group, d.setting.temperature): d for d in differences if d.metric == "tau"}


def test_a_planted_difference_is_found_where_it_is() -> None:
    found = taus(compare(made_run("a", CHANCES), made_run("b", CHANCES, seed=1, lift=0.17)).differences)
    for group in ("gsm8k", "math500", "math"):
        for temperature in (0.0, 1.0):
            d = found[group, temperature]
            assert d.is_significant
            assert 0 < d.difference.low < d.difference.high
            assert d.ratio.value == pytest.approx(d.second / d.first)
            assert d.ratio.low > 1
    assert not found["mbpp", 0.0].is_significant
    assert not found["mt-bench", 1.0].is_significant


def test_equals_differ_by_chance_alone() -> None:
    """Of many pairs of equals about one in twenty is called different."""
    called = []
    for seed in range(12):
        comparison = compare(made_run("a", CHANCES, seed, 12, False), made_run("b", CHANCES, 100 + seed, 12, False))
        called += [d.is_significant for d in taus(comparison.differences).values() if d.group in ("gsm8k", "mt-bench")]
    assert sum(called) / len(called) <= 0.2
    same = compare(made_run("a", CHANCES), made_run("b", CHANCES))
    assert {(d.difference.value, d.p_value) for d in same.differences} == {(0.0, 1.0)}


def test_pairs_alone_count() -> None:
    first, second = made_run("a", CHANCES), made_run("b", CHANCES, seed=1)
    fewer = replace(second, rows=[r for r in second.rows if r.prompt != "gsm8k:3" and r.setting == GREEDY])
    comparison = compare(first, fewer)
    assert comparison.unpaired == 80 + 1
    assert SAMPLED not in {d.setting for d in comparison.differences}
    assert {d.prompts for d in comparison.differences if d.group == "gsm8k"} == {19}


def test_what_cannot_be_compared_is_refused() -> None:
    first = made_run("a", CHANCES)
    other = replace(first, name="b", stamp=first.stamp | {"target_digest": "u"})
    with pytest.raises(DataError, match="b: target_digest is u, and t in a"):
        compare(first, other)
    with pytest.raises(DataError, match="no prompt and setting in common"):
        compare(first, replace(first, rows=[]))


def test_p_values_are_uniform_between_equals() -> None:
    """Of resampled means around zero, p < 0.2 about one time in five."""
    rng, values = np.random.default_rng(0), []
    for _ in range(400):
        centre = rng.normal(0, 1)
        values.append(p_value(rng.normal(centre, 1, 500)))
    assert 0.15 < np.mean(np.array(values) < 0.2) < 0.27
    assert p_value(np.full(500, 1.0)) == pytest.approx(2 / 501)


def test_few_prompts_are_never_significant() -> None:
    found = taus(compare(made_run("a", CHANCES, prompts=5), made_run("b", (0.1,) * 4, prompts=5)).differences)
    assert found["gsm8k", 0.0].p_value < 0.01
    assert not found["gsm8k", 0.0].is_significant
    assert found["math", 0.0].is_significant
