"""The output law of the whole engine under plans that follow the drafts: caps, packed rows, batches of four.

Confidence here depends strongly on the drafts and says nothing true about them, and the costs have a cliff, so a plan
that looked too far would choose which drafts are judged. Every token of every answer is compared with the target's law
after its own history: the sum of (token is v) - p(v) is a martingale, so by position the eight sums are normal with the
covariance sum of diag(p) - p p', whatever the plans were; so is the sum of them over the odd tokens, after which drafts
are trusted.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.planning import Planner
from dspark.engine.request import SamplingParams
from dspark.spec.planner import admit, best_budget, budget_seconds, rank
from dspark.spec.types import DraftBlock, VerifyPlan

from .conftest import drafter_for
from .planning_parts import FixedCosts, TellingDrafter

VOCAB = 8
PROMPT = [3, 1, 5]
TOKENS = 6
TRIALS = 2_048
GROUP = 4
# For four requests of three drafts each. LINE: likely drafts pay. CLIFF: the first draft is dear and behind it rows are
# nearly free, so by this round's confidences all pay or none, as two second drafts or more are odd or not. A verify
# length's last row judges one draft more: those two drafts, the second ones, are kept only where their round pays.
LINE = [1.0] * 5 + [1 + 0.11 * row for row in range(1, 20)]
CLIFF = [1.0] * 5 + [2.63 + 0.001 * row for row in range(20)]


SHAPE = {
    "target_layer_ids": (0,), "num_hidden_layers": 1, "block_size": 3, "markov_rank": 0, "enable_confidence_head": True,
}  # fmt: skip


class GroupedPlanner(Planner):
    """Plans batches of four side by side, so that hundreds of them share each forward."""

    def verify(self, older, survival, longest, num_drafting) -> VerifyPlan:
        lens = []
        for start in range(0, len(longest), GROUP):
            part = slice(start, start + GROUP)
            drafting = int((longest[part] > 1).sum())
            lens.append(self.verify_group(older[part], survival[part], longest[part], drafting).verify_lens)
        return VerifyPlan(torch.cat(lens))

    def verify_group(self, older, survival, longest, num_drafting) -> VerifyPlan:
        return super().verify(older, survival, longest, num_drafting)

    def _choose(self, slots, max_lens):
        return max_lens > 1


class LookingAhead(GroupedPlanner):
    """Planted: the best of all budgets by this round's confidences."""

    def verify_group(self, older, survival, longest, num_drafting) -> VerifyPlan:
        ranking = rank(survival, longest)
        return admit(ranking, best_budget(ranking, budget_seconds(ranking, self.costs, num_drafting)))


@pytest.fixture(scope="module")
def pair(make_model):
    """A target over eight tokens, of laws so even that a drafter mostly agrees; and the target in transformers."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    target, reference = make_model("llama", vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.05, **small)
    drafter = drafter_for(target.decoder, TellingDrafter, **SHAPE)
    return target, drafter, reference


def answers(pair, planner: type[GroupedPlanner], kind: str, table: list[float]) -> tuple[torch.Tensor, FixedCosts]:
    """Answers [TRIALS, TOKENS] of requests whose rounds are planned four by four."""
    target, drafter, _ = pair
    settings = EngineSettings(max_batch=512, max_length=16, block_size=4, step_tokens=4096)
    engine, costs = Engine(target, drafter, settings), FixedCosts(table)
    engine._round.planner = planner(kind, drafter.num_drafts, 512, costs, has_confidence=True)
    if table is CLIFF:  # hardly a group would get over it, were these confidences found out
        engine._round.planner._correction.learn = lambda *outcomes: None
    params = [SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=i) for i in range(TRIALS)]
    done = engine.generate([PROMPT] * TRIALS, params)
    assert engine.stats.accepted_by_position[0] > TRIALS / 5, "too few drafts are accepted to tell"
    engine.check_integrity()
    return torch.tensor([completion.token_ids for completion in done]), costs


def p_values(reference, tokens: torch.Tensor) -> list[float]:
    """By position, from the target's law after each answer's own history: of all tokens, and of odd against even."""
    text = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], dim=1)
    with torch.inference_mode():
        rows = reference(text).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1).numpy()  # [N, TOKENS, V]
    seen = np.eye(VOCAB)[tokens.numpy()]
    odd = np.arange(VOCAB) % 2
    found = []
    for position in range(TOKENS):
        p, excess = rows[:, position], (seen - rows)[:, position].sum(0)
        covariance = np.diag(p.sum(0)) - p.T @ p
        found.append(chi2.sf(excess @ np.linalg.pinv(covariance) @ excess, VOCAB - 1))
        found.append(chi2.sf((excess @ odd) ** 2 / (odd @ covariance @ odd), 1))
    return [float(value) for value in found]


@pytest.mark.parametrize(("kind", "table"), [("early_stop", LINE), ("lagged", CLIFF), ("lagged", LINE)])
def test_planned_answers_follow_the_target(pair, kind, table):
    tokens, costs = answers(pair, GroupedPlanner, kind, table)
    trimmed = [rows < requests + 4 * drafted for requests, drafted, rows in costs.seen]
    assert sum(trimmed) > len(trimmed) / 2, "the plans hardly trim"
    assert min(p_values(pair[2], tokens)) > 1e-4


def test_a_search_that_looks_ahead_is_caught(pair):
    tokens, _ = answers(pair, LookingAhead, "early_stop", CLIFF)
    values = p_values(pair[2], tokens)
    assert min(values) < 1e-8, values


class TellsAhead(TellingDrafter):
    """Planted: confidence in a draft that follows from the draft after it."""

    def propose(self, anchors, batch, cache, rows, seq_lens, num_drafts) -> DraftBlock:
        block = super().propose(anchors, batch, cache, rows, seq_lens, num_drafts)
        return block._replace(confidence_logits=torch.where(block.tokens.roll(-1, dims=1) % 2 == 1, 3.9, -3.9))


def held_to_a_threshold(pair, kind: type[TellingDrafter]) -> torch.Tensor:
    """Answers [TRIALS, TOKENS] of requests that ask for confidence; which drafts are verified follows from it alone."""
    drafter = pair[1] if kind is TellingDrafter else drafter_for(pair[0].decoder, kind, **SHAPE)
    engine = Engine(pair[0], drafter, EngineSettings(max_batch=512, max_length=16, block_size=4, step_tokens=4096))
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=i, draft_threshold=0.5)
        for i in range(TRIALS)
    ]
    done = engine.generate([PROMPT] * TRIALS, params)
    assert engine.stats.drafted < 0.9 * engine.stats.proposed, "the threshold hardly trims"
    return torch.tensor([completion.token_ids for completion in done])


def test_answers_held_to_a_threshold_follow_the_target(pair):
    assert min(p_values(pair[2], held_to_a_threshold(pair, TellingDrafter))) > 1e-4


def test_a_threshold_on_confidence_that_looks_ahead_is_caught(pair):
    values = p_values(pair[2], held_to_a_threshold(pair, TellsAhead))
    assert min(values) < 1e-8, values
