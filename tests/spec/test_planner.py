"""Plans: the ends of range, and the fast planner against a slow one on random cases with ties and cliffs."""

import random

import numpy as np
import pytest
import torch
from scipy.special import expit

from dspark.spec.planner import (
    Ranking,
    admit,
    best_budget,
    choose_drafting,
    early_stop_plan,
    lagged_plan,
    rank,
    static_plan,
    survival_of,
)

from . import planner_reference as reference


def test_the_whole_block_is_verified_unless_a_request_is_near_its_end() -> None:
    wanted = torch.tensor([100, 3, 1, 0, 100, 100, 2])
    room = torch.tensor([100, 100, 100, 100, 2, 1, 9])
    assert static_plan(7, 4, wanted, room).verify_lens.tolist() == [5, 3, 1, 1, 2, 1, 2]


def test_without_drafts_one_row_is_verified() -> None:
    many = torch.tensor([100, 1])
    assert static_plan(2, 0, many, many).verify_lens.tolist() == [1, 1]


class TableCosts:
    """Seconds by requests drafted for and rows, read from a list."""

    def __init__(self, by_rows: list[float], draft: float = 0.0, plain: float | None = None) -> None:
        self.by_rows = np.array(by_rows)
        self.draft, self.plain = draft, plain

    def seconds(self, num_requests: int, num_drafting: np.ndarray, rows: np.ndarray) -> np.ndarray:
        seconds = self.by_rows[rows] + num_drafting * self.draft
        return seconds if self.plain is None else np.where(num_drafting > 0, seconds, self.plain)


class Case:
    """A random batch in dyadic numbers, so that sums are exact and ties are ties."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.num_drafts = draw.randint(1, 6)
        size = draw.randint(1, 6)
        self.survival, self.older, self.expected = (self._survival(draw, size) for _ in range(3))
        self.max_lens = [
            draw.choice([1, self.num_drafts + 1, draw.randint(1, self.num_drafts + 1)]) for _ in range(size)
        ]
        kind = draw.choice(["line", "cliffs", "flat", "free", "jagged"])
        seconds = [1.0]
        for row in range(1, size * (self.num_drafts + 1) + 1):
            cliff = draw.choice([0, 0, 0, 2])
            step = {"line": 0.125, "cliffs": cliff, "flat": 0, "free": row % 4 // 3, "jagged": draw.randint(0, 8) / 16}
            seconds.append(seconds[-1] + step[kind])
        self.seconds = seconds
        self.draft = draw.choice([0.0, 0.0, 0.125, 1.0])
        self.plain = draw.choice([seconds[size], 0.5, 2.0])

    def _survival(self, draw: random.Random, size: int) -> list[list[float]]:
        rows = []
        for _ in range(size):
            row, left = [], 1.0
            for _ in range(self.num_drafts):
                left *= draw.choice([1.0, 1.0, 0.5, 0.75, 0.25, 0.0] if draw.random() < 0.9 else [0.0])
                row.append(left)
            rows.append(row)
        return rows

    def cost_of(self, num_drafting: int, budget: int) -> float:
        if not num_drafting:
            return self.plain
        return self.seconds[len(self.max_lens) + budget] + num_drafting * self.draft

    @property
    def costs(self) -> TableCosts:
        return TableCosts(self.seconds, self.draft, self.plain)


@pytest.mark.parametrize("block", range(5))
def test_agrees_with_the_slow_planner(block: int) -> None:
    """Five times a thousand cases."""
    trimmed = 0
    for seed in range(1000 * block, 1000 * (block + 1)):
        case = Case(seed)
        survival, older, expected = (np.array(values) for values in (case.survival, case.older, case.expected))
        max_lens = np.array(case.max_lens)
        drafted = len(case.max_lens)

        def seconds(budget: int, case: Case = case, drafted: int = drafted) -> float:
            return case.cost_of(drafted, budget)

        early = early_stop_plan(survival, max_lens, case.costs, drafted).verify_lens.tolist()
        assert early == reference.early_stop(case.survival, case.max_lens, seconds), seed
        budget = reference.global_budget(case.older, case.max_lens, seconds)
        lagged = lagged_plan(older, survival, max_lens, case.costs, drafted).verify_lens.tolist()
        assert lagged == reference.take(case.survival, case.max_lens, budget), seed
        chosen = choose_drafting(expected, max_lens, case.costs).tolist()
        assert chosen == reference.drafting(case.expected, case.max_lens, case.cost_of), seed
        trimmed += early != case.max_lens and lagged != case.max_lens
    assert trimmed > 300


def test_ties_go_to_the_lower_position_and_then_to_the_lower_request() -> None:
    survival = np.array([[0.5, 0.5, 0.25], [0.5, 0.5, 0.5], [1.0, 0.5, 0.5]])
    ranking = rank(survival, np.array([4, 4, 4]))
    assert ranking.requests.tolist() == [2, 0, 1, 0, 1, 2, 1, 2, 0]
    assert [admit(ranking, k).verify_lens.tolist() for k in (0, 2, 4, 9)] == [
        [1, 1, 1],
        [2, 1, 2],
        [3, 2, 2],
        [4, 4, 4],
    ]


def test_early_stop_halts_at_a_cliff_that_the_lagged_search_crosses() -> None:
    survival = np.array([[1.0, 1.0, 1.0]])
    max_lens, cliff = np.array([4]), TableCosts([0, 1.0, 2.5, 2.5, 2.5])
    assert early_stop_plan(survival, max_lens, cliff, 1).verify_lens.tolist() == [1]
    assert lagged_plan(survival, survival, max_lens, cliff, 1).verify_lens.tolist() == [4]


def test_the_budget_is_the_older_rounds_and_the_ranking_is_this_rounds() -> None:
    older = np.array([[1.0, 0.0], [1.0, 0.0]])
    survival = np.array([[0.25, 0.25], [0.75, 0.5]])
    costs = TableCosts([0, 0, 1, 1.25, 1.5, 3, 3])
    assert lagged_plan(older, survival, np.array([3, 3]), costs, 2).verify_lens.tolist() == [1, 3]


def test_a_drafter_that_costs_more_than_it_gives_is_left_alone() -> None:
    max_lens = np.array([3, 3, 3])
    expected = np.array([[0.5, 0.25], [0.9, 0.8], [0.0, 0.0]])
    rows = [0, *[1.0] * 9]
    assert choose_drafting(expected, max_lens, TableCosts(rows, draft=0.1)).tolist() == [True, True, False]
    assert choose_drafting(expected, max_lens, TableCosts(rows, draft=0.3)).tolist() == [False, True, False]
    assert choose_drafting(expected, max_lens, TableCosts(rows, draft=0.7)).tolist() == [False, False, False]
    assert choose_drafting(expected, np.array([1, 1, 1]), TableCosts(rows)).tolist() == [False, False, False]
    for least, chosen in ((0.20, True), (0.21, False)):  # 4.7 tokens in 1.3 seconds against 3 a second
        found = choose_drafting(expected, max_lens, TableCosts(rows, draft=0.3), least)
        assert found.tolist() == [False, chosen, False]


def test_survival_divides_by_the_temperatures_and_never_rises() -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0], [0.0, float("nan"), 9.0]])
    survival = survival_of(logits, [2.0, 1.0, 0.5])
    assert survival[0].tolist() == pytest.approx(expit([1.0, -1.0, 6.0]).cumprod().tolist(), rel=1e-12)
    assert survival[1].tolist() == [0.5, 0.0, 0.0]


def test_the_smallest_of_equal_budgets_is_taken() -> None:
    ranking = Ranking(np.array([1.0, 1.0]), np.array([0, 0]), 1)
    assert best_budget(ranking, np.array([1.0, 2.0, 3.0])) == 0
