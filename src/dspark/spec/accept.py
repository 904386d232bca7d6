"""Lossless acceptance: whatever the drafter proposed, the output follows the target's law.

Shape legend: B requests, G drafts, T = G + 1 verify rows, V target vocabulary, Vd draft vocabulary, b some requests.
Row i of the target's logits judges draft i and, if the run ends there, gives the bonus; row G judges nothing.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dspark.kernels.choice import kernels_for
from dspark.spec.sampling import Role, argmax, categorical, probabilities, uniform
from dspark.spec.types import Acceptance, DraftBlock, SamplingRows, VerifyPlan

Verification = Literal["token", "block"]


def accept(
    block: DraftBlock,
    target_logits: Float[Tensor, "B T V"],
    plan: VerifyPlan,
    rows: SamplingRows,
    positions: Int64[Tensor, " B"],
    verification: Verification = "token",
) -> Acceptance:
    """Judge a block from left to right (speculative sampling, arXiv 2211.17192 and 2302.01318).

    A sampled request accepts draft x while u * q(x) < p(x); the first rejection draws the bonus from
    normalise(max(p - q, 0)), a whole accepted run draws it from p. A greedy request accepts drafts that equal the
    argmax, and the argmax after the run is the bonus. Rows at or beyond a request's verify length decide nothing: where
    that cuts a run, the draft that the last row accepted is the bonus.

    verification "block" judges the whole blocks of sampled requests at once (arXiv 2403.10444), which accepts at least
    as many drafts on average; a request with a shorter verify length is judged by token. Its outcome depends on drafts
    that are then dropped, so each round needs its own seeds (`round_seed`), and verify lengths must not depend on the
    drafts of this round.

    positions: of the anchors, so draft i sits at `positions + 1 + i`. Bonus -1: the deciding row had no finite logit.
    """
    batch_size, num_rows, _ = target_logits.shape
    assert block.tokens.shape == (batch_size, num_rows - 1), "one verify row a draft, and the anchor's"
    by_block = (plan.verify_lens == num_rows) & (rows.temperature > 0) & (verification == "block" and num_rows > 1)
    kinds = (
        (_accept_sampled, ((rows.temperature > 0) & ~by_block).nonzero().squeeze(1)),
        (_accept_blocks, by_block.nonzero().squeeze(1)),
    )
    for judge, some in kinds:
        if len(some) == batch_size:
            return judge(block, target_logits, plan.verify_lens, rows, positions)
    outcome = accept_choices(block.tokens, choices(target_logits), plan.verify_lens)
    for judge, some in kinds:
        if len(some):
            judged = judge(
                block._replace(tokens=block.tokens[some], probs=block.probs.index_select(0, some)),
                target_logits.index_select(0, some),
                plan.verify_lens[some],
                rows.select(some),
                positions[some],
            )
            outcome.correct_len[some] = judged.correct_len
            outcome.bonus[some] = judged.bonus
    return outcome


def emitted(tokens: Int64[Tensor, "B G"], acceptance: Acceptance) -> Int64[Tensor, "B T"]:
    """What each request puts out: its accepted drafts, then the bonus, then -1."""
    if kernels := kernels_for(tokens):
        out: Tensor = kernels.emit(tokens, acceptance.correct_len, acceptance.bonus)
        return out
    place = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    end = acceptance.correct_len[:, None]
    return torch.where(place < end, F.pad(tokens, (0, 1)), torch.where(place == end, acceptance.bonus[:, None], -1))


def choices(logits: Float[Tensor, "*rows V"]) -> Int64[Tensor, "*rows"]:
    """What a greedy request takes by each row: the argmax, or -1 where no logit is finite."""
    best = argmax(logits)
    finite = logits.gather(-1, best.unsqueeze(-1)).squeeze(-1).isfinite()
    return torch.where(finite, best, -1)


def accept_choices(
    tokens: Int64[Tensor, "B G"], best: Int64[Tensor, "B T"], verify_lens: Int64[Tensor, " B"]
) -> Acceptance:
    """Judge greedy requests by what each row chooses; see `accept`. Nothing is read back from the device."""
    passed = tokens == best[:, :-1]
    if kernels := kernels_for(passed):
        return Acceptance(*kernels.end_run(passed, verify_lens, best))
    # Where the cap cuts the run, the argmax of the last row is the draft it accepted.
    correct_len = torch.minimum(passed.long().cumprod(1).sum(1), verify_lens - 1)
    return Acceptance(correct_len, best.gather(1, correct_len.unsqueeze(1)).squeeze(1))


def _accept_sampled(
    block: DraftBlock,
    logits: Float[Tensor, "B T V"],
    verify_lens: Int64[Tensor, " B"],
    rows: SamplingRows,
    positions: Int64[Tensor, " B"],
) -> Acceptance:
    """Row by row, and only for the requests whose run is still going: most runs are short, laws cost the most."""
    batch_size, num_rows, vocab = logits.shape
    judged_at = positions[:, None] + 1 + torch.arange(num_rows, device=positions.device)
    bonus_noise = uniform(rows.seed[:, None], judged_at, Role.BONUS)
    hurdle = uniform(rows.seed[:, None], judged_at[:, :-1], Role.ACCEPT) * _drafted_probs(block, vocab)
    correct_len, bonus = torch.zeros_like(positions), torch.zeros_like(positions)
    running = torch.arange(batch_size, device=positions.device)
    for row in range(num_rows):
        judge = logits[:, row].index_select(0, running)  # a plain copy of rows: many times faster than logits[running]
        p = probabilities(judge.unsqueeze(1), rows).squeeze(1)
        if row == num_rows - 1:
            correct_len[running] = row
            bonus[running] = categorical(p, bonus_noise[running, row])
            break
        draft = block.tokens[running, row]
        accepted = hurdle[running, row] < p.gather(1, draft.unsqueeze(1)).squeeze(1)
        going = accepted & (verify_lens[running] > row + 1)
        if bool(going.all()):
            continue
        ended, rejected = running[~going], running[~accepted]
        correct_len[ended] = row
        bonus[ended] = draft[~going]  # right where the cap cut the run
        if len(rejected):
            bonus[rejected] = categorical(_residual(p[~accepted], block, rejected, row), bonus_noise[rejected, row])
        running, rows = running[going], rows.select(going)
        if not len(running):
            break
    return Acceptance(correct_len, bonus)


def _accept_blocks(
    block: DraftBlock,
    logits: Float[Tensor, "B T V"],
    verify_lens: Int64[Tensor, " B"],
    rows: SamplingRows,
    positions: Int64[Tensor, " B"],
) -> Acceptance:
    """Block verification (arXiv 2403.10444, algorithm 2): the longest prefix of drafts that passes its own test.

    With w_k = min(w_{k-1} p(x_k) / q(x_k), 1), prefix k < G passes with probability s / (s + 1 - w_k), s the sum of
    max(w_k p - q, 0) over the row after it (equation 4), and prefix G with w_G; then the bonus comes from what is left
    there. All rows are judged, so the verify lengths are T.
    """
    batch_size, num_rows, vocab = logits.shape
    everyone = torch.arange(batch_size, device=logits.device)
    judged_at = positions[:, None] + 1 + torch.arange(num_rows, device=logits.device)
    noise = uniform(rows.seed[:, None], judged_at[:, :-1], Role.ACCEPT)
    p = probabilities(logits, rows)
    likeness = p[:, :-1].gather(2, block.tokens.unsqueeze(2)).squeeze(2) / _drafted_probs(block, vocab)
    weights = torch.ones(batch_size, num_rows, dtype=torch.float64, device=logits.device)
    passed = torch.empty_like(block.tokens, dtype=torch.bool)
    for length in range(1, num_rows):
        weight = (weights[:, length - 1] * likeness[:, length - 1]).nan_to_num(0.0).clamp_max(1.0)
        passes = weights[:, length] = weight
        if length < num_rows - 1:
            left = _left(p[:, length] * weight.float()[:, None], block, everyone, length).sum(1, dtype=torch.float64)
            # 0 / 0: the laws are equal and nothing is left to draw here, but then a longer prefix passes.
            passes = (left / (left + 1 - weight)).nan_to_num(1.0)
        passed[:, length - 1] = noise[:, length - 1] < passes
    correct_len = _behind_last(passed, verify_lens)
    last = p[everyone, correct_len]
    ended = (correct_len < num_rows - 1).nonzero().squeeze(1)
    at = correct_len[ended]
    last[ended] = _residual(last[ended] * weights[ended, at].float()[:, None], block, ended, at)
    return Acceptance(correct_len, categorical(last, uniform(rows.seed, positions + 1 + correct_len, Role.BONUS)))


def _behind_last(passed: Bool[Tensor, "B G"], verify_lens: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """How many drafts the longest prefix has that passed."""
    if kernels := kernels_for(passed):
        correct_len: Tensor = kernels.end_run(passed, verify_lens, last=True)[0]
        return correct_len
    return (passed * torch.arange(1, passed.shape[1] + 1, device=passed.device)).amax(1)


def _drafted_probs(block: DraftBlock, vocab: int) -> Float64[Tensor, "B G"]:
    """q of each draft, under the law it was drawn from."""
    index = block.tokens
    if block.token_ids is not None:
        draft_index = index.new_zeros(vocab)
        draft_index[block.token_ids] = torch.arange(len(block.token_ids), device=index.device)
        index = draft_index[index]
    return block.probs.gather(2, index.unsqueeze(2)).squeeze(2).double()


def _residual(
    p: Float32[Tensor, "b V"], block: DraftBlock, requests: Int64[Tensor, " b"], draft: int | Int64[Tensor, " b"]
) -> Float32[Tensor, "b V"]:
    """max(p - q, 0) of a rejected draft, not normalised; p itself where nothing is left of it."""
    left = _left(p, block, requests, draft)
    empty = ~(left.sum(1) > 0)
    if bool(empty.any()):
        left[empty] = p[empty]
    return left


def _left(
    p: Float32[Tensor, "b V"], block: DraftBlock, requests: Int64[Tensor, " b"], draft: int | Int64[Tensor, " b"]
) -> Float32[Tensor, "b V"]:
    """max(p - q, 0), q the law of one draft of each request."""
    q = block.probs.flatten(0, 1).index_select(0, requests * block.num_drafts + draft)
    if block.token_ids is None:
        return (p - q).clamp_min_(0)
    # Many times faster than index_add; no id occurs twice.
    return p.scatter_add(1, block.token_ids.expand_as(q), -q).clamp_min_(0)
