"""Which plans keep the target's law: exact small examples, judged by the real acceptance.

Two tokens, A = 0 and B = 1; the target gives A .7 everywhere. Drafts and confidences are tables, so a round is a few
tensor operations for all requests at once, and equal batches share a plan.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from dspark.spec.accept import accept
from dspark.spec.planner import admit, best_budget, budget_seconds, early_stop_plan, lagged_plan, rank
from dspark.spec.sampling import Role, categorical, round_seed, uniform
from dspark.spec.types import DraftBlock, VerifyPlan

from .reference import Params, make_rows
from .test_planner import TableCosts

TARGET = torch.tensor([0.7, 0.3])
Survival = tuple[tuple[float, ...], ...]  # of each request of one batch
Planner = Callable[[Survival, Survival], list[int]]  # (two rounds ago, now) -> verify lengths


def planner_of(kind: str, costs: TableCosts) -> Planner:
    """A plan for one batch. "same round" is the planted fault: it searches all budgets by this round's confidences."""

    @cache
    def plan(older: Survival, now: Survival) -> list[int]:
        before, survival = np.array(older), np.array(now)
        size, num_drafts = survival.shape
        max_lens = np.full(size, num_drafts + 1)
        if kind == "early stop":
            return early_stop_plan(survival, max_lens, costs, size).verify_lens.tolist()
        if kind == "lagged":
            return lagged_plan(before, survival, max_lens, costs, size).verify_lens.tolist()
        ranking = rank(survival, max_lens)
        return admit(ranking, best_budget(ranking, budget_seconds(ranking, costs, size))).verify_lens.tolist()

    return plan


PLANNERS = ("early stop", "lagged", "same round")
COUNTER_COSTS = TableCosts([0, 1, 1 / 0.5, 1 / 0.45])  # SPS 1, .5, .45


@pytest.mark.parametrize(("kind", "share"), [("early stop", 0.7), ("lagged", 0.7), ("same round", 0.85)])
def test_counter_example(kind: str, share: float) -> None:
    """One request, drafts of law (.5, .5); c = .8, then .9 after A and 0 after B; only admitted drafts are judged."""
    trials = 20_000
    rows = make_rows([Params()] * trials, torch.arange(trials))
    drafts = categorical(torch.full((trials, 2, 2), 0.5), uniform(rows.seed[:, None], torch.tensor([1, 2]), Role.DRAFT))
    plan = planner_of(kind, COUNTER_COSTS)
    chances = {0: ((0.8, 0.8 * 0.9),), 1: ((0.8, 0.0),)}  # by the first draft
    first = torch.empty(trials, dtype=torch.long)
    admitted = torch.tensor([plan(chances[i % 2], chances[x])[0] - 1 for i, x in enumerate(drafts[:, 0].tolist())])
    for count in range(3):
        some = (admitted == count).nonzero().squeeze(1)
        block = DraftBlock(drafts[some, :count], torch.full((len(some), count, 2), 0.5))
        logits = TARGET.log().expand(len(some), count + 1, 2)
        all_rows = VerifyPlan(torch.full((len(some),), count + 1))
        outcome = accept(block, logits, all_rows, rows.select(some), torch.zeros(len(some), dtype=torch.long))
        first[some] = torch.where(outcome.correct_len > 0, drafts[some, 0], outcome.bonus)
    assert float((first == 0).double().mean()) == pytest.approx(share, abs=4 * 0.46 / trials**0.5)


class World(NamedTuple):
    """Batches of equal make-up."""

    draft_a: Tensor  # [B, G] the probability of A
    confidence: Callable[
        [int, int, int, int], float
    ]  # (request, position, slot, the draft before it) -> c; slot from 0
    costs: TableCosts
    target_a: Tensor = torch.tensor([0.7])  # [B]


def run(world: World, kind: str, num_batches: int, num_tokens: int, fresh: bool = True) -> Tensor:
    """The first tokens of each request, [num_batches, B, num_tokens]; `fresh` False is a planted fault."""
    size, num_drafts = world.draft_a.shape
    total = num_batches * size
    rows = make_rows([Params()] * total, torch.arange(total) * 7919)
    q = torch.stack([world.draft_a, 1 - world.draft_a], -1).repeat(num_batches, 1, 1)  # [N, G, 2]
    target = world.target_a.expand(size).repeat(num_batches)
    logits = torch.stack([target, 1 - target], -1).log()[:, None].expand(total, num_drafts + 1, 2)
    text = torch.zeros(total, num_tokens + num_drafts + 1, dtype=torch.long)
    length = torch.zeros(total, dtype=torch.long)
    table = cache(world.confidence)
    plan = planner_of(kind, world.costs)
    ones: Survival = ((1.0,) * num_drafts,) * size
    history: list[list[Survival]] = []
    while bool((length < num_tokens).any()):
        seeds = round_seed(rows.seed, length) if fresh else rows.seed
        at = length[:, None] + 1 + torch.arange(num_drafts)
        drafts = categorical(q, uniform(seeds[:, None], at, Role.DRAFT))
        now = survival_table(table, drafts.tolist(), length.tolist(), size)
        older = history[-2] if len(history) > 1 else [ones] * num_batches
        history.append(now)
        lens = torch.tensor([plan(*pair) for pair in zip(older, now, strict=True)]).flatten()
        outcome = accept(DraftBlock(drafts, q), logits, VerifyPlan(lens), rows, length)
        output = torch.cat([drafts, drafts[:, :1]], 1).scatter_(1, outcome.correct_len[:, None], outcome.bonus[:, None])
        for k in range(num_drafts + 1):
            kept = ((k < outcome.commit_len) & (length + k < text.shape[1])).nonzero().squeeze(1)
            text[kept, length[kept] + k] = output[kept, k]
        length += outcome.commit_len
    return text[:, :num_tokens].view(num_batches, size, num_tokens)


def survival_table(
    confidence: Callable[[int, int, int, int], float], drafts: list[list[int]], length: list[int], size: int
) -> list[Survival]:
    """This round's survival, batch by batch."""
    rows = []
    for i, (row, position) in enumerate(zip(drafts, length, strict=True)):
        before = [0, *row[:-1]]
        chances = [confidence(i % size, position, slot, previous) for slot, previous in enumerate(before)]
        rows.append(tuple(np.cumprod(chances).tolist()))
    return [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]


def p_value(tokens: Tensor, a: float = 0.7) -> float:
    """Chi-square of the joint law of one request's first tokens [trials, n] against independent draws."""
    trials, count = tokens.shape
    cells = torch.bincount((tokens * 2 ** torch.arange(count)).sum(1), minlength=2**count).double()
    num_b = torch.tensor([bin(cell).count("1") for cell in range(2**count)])
    law = a ** (count - num_b).double() * (1 - a) ** num_b.double() * trials
    return float(chi2.sf(float(((cells - law) ** 2 / law).sum()), 2**count - 1))


# Two cheap drafts more pay for one dear one: whether the first is worth verifying shows in the third confidence.
CLIFF = TableCosts([0, 1, 2, 2.75, 2.8, 2.85])


def after_a(request: int, position: int, slot: int, previous: int) -> float:
    return 0.8 if slot == 0 else 0.9 if previous == 0 else 0.05


@pytest.mark.parametrize("kind", PLANNERS)
def test_a_search_that_looks_ahead_is_caught(kind: str) -> None:
    """`accept` judges one draft beyond the last row that runs, so the fault shows a token later than in the paper."""
    world = World(torch.full((1, 4), 0.5), after_a, CLIFF)
    tokens = run(world, kind, 12_000, 3)[:, 0]
    if kind == "same round":
        assert p_value(tokens) < 1e-12
        assert float((tokens[:, 1] == 0).double().mean()) > 0.72
    else:
        assert p_value(tokens) > 1e-3


def fifth_after_a(request: int, position: int, slot: int, previous: int) -> float:
    """Whether five drafts are worth verifying, or none, shows in the fifth confidence, and so in the fourth draft."""
    return 0.99 if slot < 4 or previous == 0 else 0.01


@pytest.mark.parametrize("fresh", [True, False])
def test_drafts_need_new_noise_in_every_round_where_the_budget_is_lagged(fresh: bool) -> None:
    """One request alone. After two rounds of one token each, the fourth position is drafted again in the third round,
    or in the fourth if the third has no budget: which of the two was decided by its draft in the first round."""
    costs = TableCosts([0, 1, 2.05, 3.05, 4.05, 5.05, 5.3])
    world = World(torch.tensor([[0.2, 0.5, 0.5, 0.5, 0.5]]), fifth_after_a, costs)
    value = p_value(run(world, "lagged", 20_000, 4, fresh)[:, 0])
    assert value > 1e-3 if fresh else value < 1e-6


def neighbour(request: int, position: int, slot: int, previous: int) -> float:
    """Request 0: its fourth confidence at the start looks at the third draft. Request 1: worth verifying when even."""
    if request == 1:
        return 0.0 if slot else 0.5 if position == 0 else 0.99 * (position % 2 == 0)
    if position:
        return 0.9 if slot == 0 else 0.0
    return (0.999, 0.9, 0.9, 0.99 if previous == 0 else 0.01)[slot]


@pytest.mark.parametrize("fresh", [True, False])
def test_drafts_need_new_noise_in_every_round_where_a_budget_is_shared(fresh: bool) -> None:
    """Two requests, early stop. What the first one drafts in vain decides how far the second gets in that round, which
    decides what is left for the first one in the next."""
    costs = TableCosts([0, 0, 2, 2.95, 2.97, 2.98, 2.99, 9, 9, 9, 9])
    world = World(torch.tensor([[0.9, 0.5, 0.5, 0.5], [1.0, 1, 1, 1]]), neighbour, costs, torch.tensor([0.7, 1.0]))
    tokens = run(world, "early stop", 15_000, 4, fresh)
    assert not tokens[:, 1].any(), "the second one only writes A"
    value = p_value(tokens[:, 0])
    assert value > 1e-3 if fresh else value < 1e-6
