"""Lossless acceptance: whatever the drafter proposed, the output follows the target's law.

Shape legend: B requests, G drafts, T = G + 1 verify rows, V target vocabulary, Vd draft vocabulary, b some requests.
Row i of the target's logits judges draft i and, if the run ends there, gives the bonus; row G judges nothing.
"""

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dspark.spec.sampling import Role, argmax, categorical, probabilities, uniform
from dspark.spec.types import Acceptance, DraftBlock, SamplingRows, VerifyPlan


def accept(
    block: DraftBlock,
    target_logits: Float[Tensor, "B T V"],
    plan: VerifyPlan,
    rows: SamplingRows,
    positions: Int64[Tensor, " B"],
) -> Acceptance:
    """Judge a block from left to right (speculative sampling, arXiv 2211.17192 and 2302.01318).

    A sampled request accepts draft x while u * q(x) < p(x); the first rejection draws the bonus from
    normalise(max(p - q, 0)), a whole accepted run draws it from p. A greedy request accepts drafts that equal the
    argmax, and the argmax after the run is the bonus. Rows at or beyond a request's verify length decide nothing: where
    that cuts a run, the draft that the last row accepted is the bonus.

    positions: of the anchors, so draft i sits at `positions + 1 + i`. Bonus -1: the deciding row had no finite logit.
    """
    batch_size, num_rows, _ = target_logits.shape
    assert block.tokens.shape == (batch_size, num_rows - 1), "one verify row a draft, and the anchor's"
    sampled = rows.temperature.nonzero().squeeze(1)
    if len(sampled) == batch_size:
        return _accept_sampled(block, target_logits, plan.verify_lens, rows, positions)
    outcome = _accept_greedy(block.tokens, target_logits, plan.verify_lens)
    if len(sampled):
        some = _accept_sampled(
            block._replace(tokens=block.tokens[sampled], probs=block.probs.index_select(0, sampled)),
            target_logits.index_select(0, sampled),
            plan.verify_lens[sampled],
            rows.select(sampled),
            positions[sampled],
        )
        outcome.correct_len[sampled] = some.correct_len
        outcome.bonus[sampled] = some.bonus
    return outcome


def _accept_greedy(
    tokens: Int64[Tensor, "B G"], logits: Float[Tensor, "B T V"], verify_lens: Int64[Tensor, " B"]
) -> Acceptance:
    best = argmax(logits)
    finite = logits.gather(2, best.unsqueeze(2)).squeeze(2).isfinite()
    best = torch.where(finite, best, -1)
    judged = torch.arange(tokens.shape[1], device=tokens.device) < verify_lens[:, None]
    run = ((tokens == best[:, :-1]) & judged).long().cumprod(1).sum(1)
    # Where the cap cuts the run, the argmax of the last row is the draft it accepted.
    correct_len = torch.minimum(run, verify_lens - 1)
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


def _drafted_probs(block: DraftBlock, vocab: int) -> Float64[Tensor, "B G"]:
    """q of each draft, under the law it was drawn from."""
    index = block.tokens
    if block.token_ids is not None:
        draft_index = index.new_zeros(vocab)
        draft_index[block.token_ids] = torch.arange(len(block.token_ids), device=index.device)
        index = draft_index[index]
    return block.probs.gather(2, index.unsqueeze(2)).squeeze(2).double()


def _residual(
    p: Float32[Tensor, "b V"], block: DraftBlock, requests: Int64[Tensor, " b"], draft: int
) -> Float32[Tensor, "b V"]:
    """max(p - q, 0) of a rejected draft, not normalised; p itself where nothing is left of it."""
    q = block.probs[:, draft].index_select(0, requests)
    if block.token_ids is None:
        left = (p - q).clamp_min_(0)
    else:
        left = p.index_add(1, block.token_ids, q, alpha=-1).clamp_min_(0)
    empty = ~(left.sum(1) > 0)
    if bool(empty.any()):
        left[empty] = p[empty]
    return left
