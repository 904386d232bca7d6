"""Figures against slow ones, counted round by round; intervals against what they promise."""

import random
from itertools import pairwise

import numpy as np
import pytest

from dspark.evaluation.rows import Row
from dspark.evaluation.stats import Estimate, figures, resample
from dspark.evaluation.summary import by_context, summarise

from .made_rows import GREEDY, made_row, made_run

CHANCES = (0.8, 0.7, 0.5, 0.6)


def drafted(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.drafted and row.setting == GREEDY]


def test_figures_are_those_counted_round_by_round() -> None:
    run = made_run("a", CHANCES)
    rows = drafted(run.rows)
    found = figures(rows, run.plain())
    rounds = [r for row in rows for r in row.rounds]
    assert found.rounds == len(rounds)
    assert found.tau.value == pytest.approx(sum(r.num_output for r in rounds) / len(rounds))
    assert found.acceptance_rate.value == pytest.approx(
        sum(r.correct_len for r in rounds) / sum(r.verify_len - 1 for r in rounds)
    )
    assert found.drafts_per_round.value == pytest.approx(sum(r.verify_len - 1 for r in rounds) / len(rounds))
    assert found.verify_rate.value == pytest.approx(
        sum(r.verify_len - 1 for r in rounds) / sum(r.num_drafts for r in rounds)
    )
    for i in range(len(CHANCES)):
        judged = [r for r in rounds if r.verify_len > i + 1]
        at_risk = [r for r in judged if r.correct_len >= i]
        accepted = sum(r.correct_len > i for r in judged)
        assert found.survival[i].value == pytest.approx(accepted / len(judged))
        assert found.conditional[i].value == pytest.approx(accepted / len(at_risk))
        assert found.conditional[i].value == pytest.approx(CHANCES[i], abs=0.06)
    assert all(a.value >= b.value for a, b in pairwise(found.survival))
    assert found.outputs == [sum(r.num_output == n for r in rounds) for n in range(len(CHANCES) + 2)]
    assert found.prompt_tau == pytest.approx([sum(r.num_output for r in row.rounds) / len(row.rounds) for row in rows])


def test_speeds_are_of_the_same_prompts() -> None:
    run = made_run("a", CHANCES)
    rows, plain = drafted(run.rows), run.plain()
    for row in rows[:5]:
        del plain[row.pair]  # a run that was cut off before these were decoded plainly
    found = figures(rows, plain)
    both = rows[5:]
    fast = sum(r.decoded for r in both) / sum(r.seconds.decode for r in both)
    slow = sum(plain[r.pair].decoded for r in both) / sum(plain[r.pair].seconds.decode for r in both)
    assert found.tokens_per_second.value == pytest.approx(
        sum(r.decoded for r in rows) / sum(r.seconds.decode for r in rows)
    )
    assert found.plain_tokens_per_second.value == pytest.approx(slow)
    assert found.speedup.value == pytest.approx(fast / slow)
    assert found.speedup_with_prefill.value < found.speedup.value
    assert found.same_as_plain.value == 1.0
    assert figures(rows, {}).speedup == Estimate(None)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Means of normal draws: nineteen of twenty intervals, or nearly so with thirty prompts each."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        values = rng.normal(1.0, 1.0, 30)
        weights = resample(["x"] * 30, count=400, seed=int(rng.integers(1 << 30)))
        low, high = np.percentile(weights @ values / 30, [2.5, 97.5])
        held += low <= 1.0 <= high
    assert 0.89 <= held / 300 <= 0.98


def test_resampling_keeps_the_mix_of_tasks() -> None:
    weights = resample(["a"] * 3 + ["b"] * 5, count=50)
    assert (weights[:, :3].sum(axis=1) == 3).all()
    assert (weights[:, 3:].sum(axis=1) == 5).all()
    assert (resample(["a"] * 9) == resample(["a"] * 9)).all(), "a report is the same each time it is made"


def test_one_prompt_has_no_interval_and_nothing_no_value() -> None:
    (row, *_) = drafted(made_run("a", CHANCES).rows)
    found = figures([row], {})
    assert found.tau.value is not None
    assert found.tau.low is None
    assert found.plain_tokens_per_second.value is None
    single = made_row(random.Random(0), "gsm8k", 0, GREEDY, ())
    assert figures([single], {}).acceptance_rate == Estimate(None)


def test_summary_groups_and_context() -> None:
    run = made_run("a", CHANCES)
    greedy, sampled = summarise(run.rows)
    assert (greedy.setting.temperature, sampled.setting.temperature) == (0, 1)
    assert list(greedy.groups) == ["gsm8k", "math500", "mbpp", "mt-bench", "math", "all"]
    assert greedy.categories["math"].rounds == greedy.tasks["gsm8k"].rounds + greedy.tasks["math500"].rounds
    contexts = by_context(drafted(run.rows))
    assert sum(part.rounds for part in contexts.values()) == greedy.everything.rounds
    assert list(contexts) == ["0–127", "128–255", "256–511", "512–1023"]
    short = [r for row in drafted(run.rows) for r in row.rounds if r.position < 128]
    assert contexts["0–127"].tau.value == pytest.approx(sum(r.num_output for r in short) / len(short))
    assert set(greedy.spread["script of the prompt"]) == {"latin", "cyrillic"}
