"""Acceptance, request by request, against the slow reference; caps, ends of range and broken rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark.spec.accept
from dspark.spec.accept import accept
from dspark.spec.sampling import Role, categorical, probabilities, uniform
from dspark.spec.types import DraftBlock, SamplingRows, VerifyPlan

from .reference import GREEDY, Params, accept_one, make_rows

KINDS = [Params(), GREEDY, Params(0.6), Params(top_k=3), Params(top_p=0.7), Params(1.2, 6, 0.9, 0.05)]


class Case:
    """Random drafts and verify rows for a mixed batch; drafts resemble the target, so that runs have any length."""

    def __init__(self, seed: int, batch_size: int, num_drafts: int, vocab: int, reduced: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = [KINDS[int(i)] for i in torch.randint(len(KINDS), (batch_size,), generator=generator)]
        self.rows = make_rows(self.params, torch.randint(-(1 << 62), 1 << 62, (batch_size,), generator=generator))
        self.positions = torch.randint(0, 5000, (batch_size,), generator=generator)
        self.logits = torch.randn(batch_size, num_drafts + 1, vocab, generator=generator) * 2
        self.token_ids = torch.randperm(vocab, generator=generator)[: vocab // 2 + 1] if reduced else None
        noise = torch.randn(batch_size, num_drafts, vocab, generator=generator) * 0.5
        near = self.logits[:, :-1] + noise
        self.block = self.drafted(near if self.token_ids is None else near[..., self.token_ids])
        self.verify_lens = torch.randint(1, num_drafts + 2, (batch_size,), generator=generator)

    def drafted(self, logits: torch.Tensor) -> DraftBlock:
        """A block drawn from these logits."""
        batch_size, num_drafts, _ = logits.shape
        if not num_drafts:
            return DraftBlock.empty(batch_size)
        law = probabilities(logits, self.rows)
        at = self.positions[:, None] + 1 + torch.arange(num_drafts)
        index = categorical(law, uniform(self.rows.seed[:, None], at, Role.DRAFT))
        law[self.rows.greedy] = torch.nan  # never read
        return DraftBlock(index if self.token_ids is None else self.token_ids[index], law, self.token_ids)

    def accept(self, which: slice = slice(None)) -> list[tuple[int, int]]:
        """(correct_len, bonus) of each request; rows past the verify length hold zeros, as after a compact forward."""
        logits = self.logits.clone()
        logits[torch.arange(logits.shape[1]) >= self.verify_lens[:, None]] = 0
        block = self.block._replace(tokens=self.block.tokens[which], probs=self.block.probs[which])
        rows = SamplingRows(*(field[which] for field in self.rows))
        outcome = accept(block, logits[which], VerifyPlan(self.verify_lens[which]), rows, self.positions[which])
        assert torch.equal(outcome.commit_len, outcome.correct_len + 1)
        return list(zip(outcome.correct_len.tolist(), outcome.bonus.tolist(), strict=True))

    def expected(self) -> list[tuple[int, int]]:
        """The same from the slow reference."""
        batch_size, num_rows, vocab = self.logits.shape
        at = self.positions[:, None] + 1 + torch.arange(num_rows)
        accept_noise = uniform(self.rows.seed[:, None], at, Role.ACCEPT).tolist()
        bonus_noise = uniform(self.rows.seed[:, None], at, Role.BONUS).tolist()
        q = torch.zeros(batch_size, num_rows - 1, vocab, dtype=torch.float64)
        if self.token_ids is None and num_rows > 1:
            q = self.block.probs.double()
        elif num_rows > 1:
            q[..., self.token_ids] = self.block.probs.double()
        return [
            accept_one(
                self.block.tokens[b].tolist(),
                list(q[b].numpy()),
                self.logits[b].numpy(),
                int(self.verify_lens[b]),
                self.params[b],
                accept_noise[b],
                bonus_noise[b],
            )
            for b in range(batch_size)
        ]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(0, 5), st.integers(2, 20), st.booleans())
def test_a_mixed_batch_equals_the_reference(
    seed: int, batch_size: int, num_drafts: int, vocab: int, reduced: bool
) -> None:
    case = Case(seed, batch_size, num_drafts, vocab, reduced and num_drafts > 0)
    assert case.accept() == case.expected()


def test_the_cases_reach_every_outcome() -> None:
    """Runs of every length, cut and not cut, greedy and sampled: else the comparison above would show little."""
    seen = set()
    for seed in range(60):
        case = Case(seed, 6, 3, 9)
        for b, (correct_len, bonus) in enumerate(case.accept()):
            verify_len, drafts = int(case.verify_lens[b]), case.block.tokens[b].tolist()
            cut = correct_len == verify_len - 1 and correct_len < 3 and bonus == drafts[correct_len]
            seen.add((bool(case.rows.greedy[b]), correct_len, "cut" if cut else "ended"))
    assert seen == {(g, n, "ended") for g in (0, 1) for n in range(4)} | {
        (g, n, "cut") for g in (0, 1) for n in range(3)
    }


def test_a_request_gets_the_same_tokens_alone() -> None:
    case = Case(1, 16, 4, 300, reduced=True)
    assert case.accept() == [case.accept(slice(b, b + 1))[0] for b in range(16)]


def test_rows_past_the_verify_length_decide_nothing() -> None:
    case = Case(2, 32, 4, 12)
    outcome = case.accept()
    case.logits[torch.arange(5) >= case.verify_lens[:, None]] = torch.nan
    for fill in (torch.nan, torch.inf, 50.0):
        logits = case.logits.clone()
        logits[torch.arange(5) >= case.verify_lens[:, None]] = fill
        again = accept(case.block, logits, VerifyPlan(case.verify_lens), case.rows, case.positions)
        assert outcome == list(zip(again.correct_len.tolist(), again.bonus.tolist(), strict=True))


def test_a_cap_only_shortens_the_output() -> None:
    """The capped output is the front of the uncapped one, whatever the cap."""
    case = Case(3, 200, 4, 6)
    tokens = case.block.tokens.tolist()
    case.verify_lens[:] = 5
    whole = [[*tokens[b][:n], bonus] for b, (n, bonus) in enumerate(case.accept())]
    for cap in range(1, 5):
        case.verify_lens[:] = cap
        for b, (n, bonus) in enumerate(case.accept()):
            assert [*tokens[b][:n], bonus] == whole[b][:cap]


def one(p_logits: list[list[float]], q: list[list[float]], tokens: list[int], seed: int) -> tuple[int, int]:
    """Accept the whole block of one request at temperature 1."""
    block = DraftBlock(torch.tensor([tokens]), torch.tensor([q]))
    plan = VerifyPlan(torch.tensor([len(p_logits)]))
    outcome = accept(block, torch.tensor([p_logits]), plan, make_rows([Params()], [seed]), torch.tensor([9]))
    return int(outcome.correct_len), int(outcome.bonus)


@pytest.mark.parametrize("seed", range(20))
def test_equal_laws_accept_everything(seed: int) -> None:
    logits = [[0.3, 1.0, -2.0]] * 3
    law = torch.tensor(logits[0]).softmax(0).tolist()
    assert one(logits, [law, law], [1, 2], seed=seed)[0] == 2


def test_no_residual_mass_falls_back_to_the_target() -> None:
    """Possible only if q was not normalised, or by rounding; the target's law is always a right answer's support."""
    logits = [[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]]
    drawn = {one(logits, [[2.0, 2.0, 2.0]], [1], seed=seed) for seed in range(40)}
    assert drawn == {(0, 0), (0, 2)}


def test_a_broken_draft_law_never_decides() -> None:
    drawn = {one([[0.0, 0.0]] * 2, [[torch.nan, torch.nan]], [1], seed=seed) for seed in range(40)}
    assert drawn == {(0, 0), (0, 1)}


def test_impossible_drafts_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is strict: noise of exactly zero does not let p = 0 through."""
    zero = torch.zeros((), dtype=torch.float64)
    monkeypatch.setattr(dspark.spec.accept, "uniform", lambda seed, at, role: zero.expand(at.shape))
    assert one([[0.0, -torch.inf], [0.0, 0.0]], [[0.5, 0.5]], [1], seed=0) == (0, 0)


@pytest.mark.parametrize("params", [Params(), Params(top_k=2, top_p=0.5), GREEDY])
def test_a_broken_row_fails_its_request_alone(params: Params) -> None:
    good, broken = [5.0, 0.0, 0.0], [-torch.inf] * 3
    logits = torch.tensor([[broken, good], [good, broken], [good, good]])
    block = DraftBlock(torch.zeros(3, 1, dtype=torch.long), torch.tensor([[[1.0, 0.0, 0.0]]]).expand(3, -1, -1))
    rows, positions = make_rows([params] * 3, [4, 5, 6]), torch.full((3,), 7)
    outcome = accept(block, logits, VerifyPlan(torch.tensor([2, 2, 2])), rows, positions)
    assert outcome.correct_len[0] == 0
    assert outcome.bonus[0] == -1
    assert outcome.bonus[1] == (-1 if outcome.correct_len[1] == 1 else outcome.bonus[1])
    assert outcome.bonus[2] >= 0
    capped = accept(block, logits, VerifyPlan(torch.tensor([1, 1, 1])), rows, positions)
    assert capped.bonus[1] >= 0, "the broken row was not verified"


@pytest.mark.parametrize("params", [Params(1e-4), Params(top_p=1e-6), Params(top_k=1)])
def test_near_greedy_sampling_is_greedy(params: Params) -> None:
    case = Case(4, 20, 3, 50)
    case.params, case.rows = [params] * 20, make_rows([params] * 20, list(range(20)))
    case.block = case.drafted(
        case.logits[:, :-1] + 0.5 * torch.randn(20, 3, 50, generator=torch.Generator().manual_seed(0))
    )
    sampled = case.accept()
    case.rows = make_rows([GREEDY] * 20, list(range(20)))
    assert sampled == case.accept()


@pytest.mark.parametrize("params", KINDS)
def test_plain_decoding_draws_from_the_target(params: Params) -> None:
    logits = torch.randn(8, 1, 40, generator=torch.Generator().manual_seed(8))
    rows, positions = make_rows([params] * 8, list(range(8))), torch.arange(8) * 10
    outcome = accept(DraftBlock.empty(8), logits, VerifyPlan(torch.ones(8, dtype=torch.long)), rows, positions)
    drawn = categorical(probabilities(logits, rows)[:, 0], uniform(rows.seed, positions + 1, Role.BONUS))
    assert outcome.correct_len.tolist() == [0] * 8
    assert torch.equal(outcome.bonus, drawn)


def test_half_precision_logits_give_the_same_outcome() -> None:
    case = Case(5, 12, 3, 64)
    case.logits = case.logits.bfloat16()
    outcome = case.accept()
    case.logits = case.logits.float()
    assert outcome == case.accept() == case.expected()


def test_greedy_drafts_need_no_law() -> None:
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(9))
    tokens = logits[:, :-1].argmax(-1)
    tokens[1, 1] = (tokens[1, 1] + 1) % 30
    rows, plan = make_rows([GREEDY] * 2, [0, 0]), VerifyPlan(torch.tensor([4, 4]))
    outcome = accept(DraftBlock(tokens, torch.empty(2, 3, 0)), logits, plan, rows, torch.tensor([0, 0]))
    assert outcome.correct_len.tolist() == [3, 1]
    assert outcome.bonus.tolist() == [int(logits[0, 3].argmax()), int(logits[1, 1].argmax())]
    assert np.array_equal(outcome.commit_len.numpy(), [4, 2])


def accepted_on_average(verification: str, num_drafts: int, spread: float) -> float:
    """Drafts accepted a block, over many seeds, where p and q of every row are the same two laws."""
    generator = torch.Generator().manual_seed(12)
    p, q = torch.randn(2, 5, generator=generator) * spread
    trials = 20_000
    rows = make_rows([Params()], [0]).select(torch.zeros(trials, dtype=torch.long))._replace(seed=torch.arange(trials))
    positions = torch.full((trials,), 3)
    law = q.softmax(0).expand(trials, num_drafts, -1)
    at = positions[:, None] + 1 + torch.arange(num_drafts)
    block = DraftBlock(categorical(law, uniform(rows.seed[:, None], at, Role.DRAFT)), law)
    plan = VerifyPlan(torch.full((trials,), num_drafts + 1))
    outcome = accept(block, p.expand(trials, num_drafts + 1, -1), plan, rows, positions, verification)
    return float(outcome.correct_len.double().mean())


def test_block_verification_accepts_more() -> None:
    by_token, by_block = (accepted_on_average(kind, 4, 1.0) for kind in ("token", "block"))
    assert by_block > by_token + 0.05
    one_token, one_block = (accepted_on_average(kind, 1, 1.0) for kind in ("token", "block"))
    assert one_token == one_block, "with a single draft the two are one"


@pytest.mark.parametrize("seed", range(10))
def test_block_verification_of_equal_laws_accepts_everything(seed: int) -> None:
    logits = torch.tensor([[[0.3, 1.0, -2.0]] * 4])
    block = DraftBlock(torch.tensor([[1, 0, 1]]), logits[:, :3].softmax(-1))
    outcome = accept(
        block, logits, VerifyPlan(torch.tensor([4])), make_rows([Params()], [seed]), torch.tensor([9]), "block"
    )
    assert int(outcome.correct_len) == 3


def test_block_verification_leaves_greedy_and_broken_rows_as_they_are() -> None:
    case = Case(6, 64, 3, 9)
    case.verify_lens[:] = 4
    by_token = case.accept()
    plan = VerifyPlan(case.verify_lens)
    by_block = accept(case.block, case.logits, plan, case.rows, case.positions, "block")
    for b in case.rows.greedy.nonzero().squeeze(1).tolist():
        assert (int(by_block.correct_len[b]), int(by_block.bonus[b])) == by_token[b]
    case.logits[:, 0] = -torch.inf
    broken = accept(case.block, case.logits, plan, case.rows, case.positions, "block")
    assert broken.correct_len.tolist() == [0] * 64
    assert broken.bonus.tolist() == [-1] * 64
