"""Calibration figures and sequential temperature scaling against plain loops and scikit-like definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from dspark.spec.calibration import (
    GRID,
    auc,
    brier,
    conditional,
    ece,
    expected_error,
    fit_temperatures,
    noise_error,
    reliability,
    survival,
    survived,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_survival(logits: list[float], temperatures: list[float]) -> list[float]:
    out, product = [], 1.0
    for logit, temperature in zip(logits, temperatures, strict=True):
        product *= sigmoid(logit / temperature)
        out.append(product)
    return out


def slow_ece(confidence: list[float], outcome: list[bool], num_bins: int = 15) -> float:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for c, o in zip(confidence, outcome, strict=True):
        bins.setdefault(min(int(c * num_bins), num_bins - 1), []).append((c, o))
    gap = 0.0
    for members in bins.values():
        mean_c = sum(c for c, _ in members) / len(members)
        mean_o = sum(o for _, o in members) / len(members)
        gap += len(members) / len(confidence) * abs(mean_c - mean_o)
    return gap


def slow_fit(logits: list[list[float]], correct: list[int], grid: tuple[float, ...]) -> list[float]:
    chosen: list[float] = []
    for k in range(len(logits[0])):
        outcome = [k < c for c in correct]
        best, best_error = None, math.inf
        for candidate in grid:
            tried = [slow_survival(row[: k + 1], [*chosen, candidate])[k] for row in logits]
            error = slow_ece(tried, outcome)
            if error < best_error:
                best, best_error = candidate, error
        assert best is not None
        chosen.append(best)
    return chosen


def drawn(n: int, true_temperatures: list[float], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of n rounds, and outcomes whose law is sigmoid(logit / true temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, len(true_temperatures), generator=generator, dtype=torch.float64) + 0.5
    accepted = torch.rand(logits.shape, generator=generator) < conditional(logits, true_temperatures)
    return logits, accepted.long().cumprod(1).sum(1)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([1, 4, 15]),
)
@settings(max_examples=60, deadline=None)
def test_error_is_the_weighted_gap_of_the_bins(rounds: list[tuple[float, bool]], num_bins: int) -> None:
    confidence, outcome = [c for c, _ in rounds], [o for _, o in rounds]
    measured = ece(torch.tensor(confidence, dtype=torch.float64), torch.tensor(outcome), num_bins)
    assert float(measured) == pytest.approx(slow_ece(confidence, outcome, num_bins), abs=1e-12)


def test_bins_hold_every_round_and_their_means() -> None:
    confidence = torch.tensor([0.0, 0.1, 0.3, 0.5, 0.99, 1.0], dtype=torch.float64)
    outcome = torch.tensor([False, True, False, True, True, False])
    bins = reliability(confidence, outcome, 4)
    assert bins.counts.tolist() == [2, 1, 1, 2]
    assert bins.confidence.tolist() == pytest.approx([0.05, 0.3, 0.5, 0.995])
    assert bins.outcome.tolist() == [0.5, 0, 1, 0.5]


def test_error_of_several_rows_at_once() -> None:
    confidence = torch.rand(3, 50, dtype=torch.float64)
    outcome = torch.rand(50) < 0.5
    assert ece(confidence, outcome).tolist() == pytest.approx([float(ece(row, outcome)) for row in confidence])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_auc_is_the_mann_whitney_statistic(rounds: list[tuple[int, bool]]) -> None:
    confidence, outcome = [c / 5 for c, _ in rounds], [o for _, o in rounds]
    measured = auc(torch.tensor(confidence, dtype=torch.float64), torch.tensor(outcome))
    true = [c for c, o in zip(confidence, outcome, strict=True) if o]
    false = [c for c, o in zip(confidence, outcome, strict=True) if not o]
    if not true or not false:
        assert measured is None
    else:
        assert measured == pytest.approx(mannwhitneyu(true, false).statistic / (len(true) * len(false)))


def test_brier_is_the_mean_square() -> None:
    assert brier(torch.tensor([0.9, 0.2], dtype=torch.float64), torch.tensor([True, True])) == pytest.approx(0.325)


def test_survival_multiplies_scaled_confidences() -> None:
    logits = torch.tensor([[1.0, -2.0, 3.0], [0.0, 5.0, -5.0]])
    temperatures = (0.5, 2.0, 1.0)
    slow = [slow_survival(row, list(temperatures)) for row in logits.tolist()]
    assert survival(logits, temperatures).tolist() == [pytest.approx(row) for row in slow]
    assert torch.equal(survival(logits), survival(logits, (1.0, 1.0, 1.0)))


def test_prefixes_survive_up_to_the_accepted_drafts() -> None:
    wanted = [[False, False, False], [True, True, False], [True, True, True]]
    assert survived(torch.tensor([0, 2, 3]), 3).tolist() == wanted


def test_fit_is_the_plain_search() -> None:
    logits, correct = drawn(60, [2.0, 0.7, 1.3], seed=3)
    grid = GRID[::8]
    fitted = fit_temperatures(logits, survived(correct, 3), grid)
    assert list(fitted) == slow_fit(logits.tolist(), correct.tolist(), grid)


def test_the_first_of_equal_minima_wins() -> None:
    logits = torch.zeros(10, 2, dtype=torch.float64)  # every temperature gives a half
    correct = torch.tensor([0, 1] * 5)
    assert fit_temperatures(logits, survived(correct, 2), (3.0, 1.0, 2.0)) == (3.0, 3.0)


def test_fit_finds_the_temperatures_that_made_the_outcomes() -> None:
    """A later position is fitted on the product: a wrong earlier temperature would spoil it."""
    true = [2.5, 0.5, 1.5]
    logits, correct = drawn(40_000, true)
    outcome = survived(correct, 3)
    fitted = fit_temperatures(logits, outcome)
    assert list(fitted) == [pytest.approx(t, rel=0.15) for t in true]
    held_out, held_correct = drawn(40_000, true, seed=1)
    before, after = survival(held_out), survival(held_out, fitted)
    happened = survived(held_correct, 3)
    for k in range(3):
        assert float(ece(after[:, k], happened[:, k])) < 0.012 < float(ece(before[:, k], happened[:, k]))


def test_noise_is_what_perfect_confidences_show() -> None:
    generator = torch.Generator().manual_seed(5)
    confidence = torch.rand(600, generator=generator, dtype=torch.float64)
    draws = torch.rand(200, 600, generator=generator, dtype=torch.float64)
    shown = torch.stack([ece(confidence, draw < confidence) for draw in draws]).mean()
    bins = reliability(confidence, draws[0] < confidence)
    assert float(noise_error(bins)) == pytest.approx(float(shown), rel=0.06)
    assert float(expected_error(bins)) < 3 * float(shown)
