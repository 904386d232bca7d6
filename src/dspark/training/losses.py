"""The drafter's losses, fused with the LM head in row chunks.

No [slots, vocabulary] tensor ever exists: each chunk of slots makes its draft and target logits, its losses and its
gradients, and is dropped, so backward recomputes nothing. Chunks are runs of slots sorted by target position, and
slots that share a position share one row of target logits.

Shapes: N slots, M target positions, H hidden, r Markov rank, Vd draft vocabulary, C slots of one chunk.
Source: DSpark paper equations 9-12 (L1 without the one half in front; see the weights in `LossMix`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.layers import softcap
from dspark.spec.sampling import argmax
from dspark.training.config import LossMix

CHUNK = 128


class HeadWeights(NamedTuple):
    """The matrices that make draft logits and, from the target's states, target logits."""

    lm_head: Tensor  # [Vd, H] rows of the draft vocabulary
    markov_w2: Tensor | None  # [Vd, r] the trained Markov projection
    target_lm_head: Tensor | None = None  # [Vd, H] the target's rows where `lm_head` is the drafter's own
    draft_cap: float | None = None  # soft cap of the LM head's logits, before the sequential head's are added
    target_cap: float | None = None  # and of the target's


class SlotTargets(NamedTuple):
    """What the draft slots are compared with. Slots are in any order; `position` points into the M target rows."""

    hidden: Tensor  # [M, H] the target's final-normed hidden states
    log_normalizer: Tensor  # [M] logsumexp of the target's logits over its FULL vocabulary
    position: Tensor  # [N] row of `hidden` whose next-token law the slot imitates
    label: Tensor  # [N] draft index of the true next token, -1 where it is outside the draft vocabulary
    weight: Tensor  # [N] position weight exp(-k / decay), 0 for masked slots


class SlotLosses(NamedTuple):
    """`total` carries the gradient: the sum over slots of weight * (a_ce CE + a_soft SoftCE + a_l1 L1)."""

    total: Tensor  # []
    ce: Tensor  # [N] -log q(label), 0 where the label is outside the draft vocabulary
    soft_ce: Tensor  # [N] -sum_v p(v) log q(v)
    l1: Tensor  # [N] sum_v |q(v) - p(v)| over the full vocabulary, in [0, 2]
    top1: Tensor  # [N] 1 where the draft's argmax is the target's


def draft_losses(
    hidden: Tensor, feature: Tensor | None, head: HeadWeights, targets: SlotTargets, mix: LossMix
) -> SlotLosses:
    """Losses of N draft slots: hidden [N, H] and Markov features [N, r] (None without a sequential head).

    Gradients flow to `hidden`, `feature`, `head.markov_w2` and, if it is trained, `head.lm_head`; the target is
    constant.
    """
    order = targets.position.argsort(stable=True)
    arguments = (hidden, feature, *head, targets, order, mix)
    outputs = _FusedLosses.apply(*arguments)  # type: ignore[no-untyped-call]
    return SlotLosses(*outputs)


class _FusedLosses(torch.autograd.Function):
    """Computes gradients in forward (they are linear in the one scalar output) and scales them in backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        (hidden, feature), head, (targets, order, mix) = args[:2], HeadWeights(*args[2:7]), args[7:]
        lm_head, w2, cap = head.lm_head, head.markov_w2, head.draft_cap
        n = hidden.shape[0]
        rows = {name: torch.zeros(n, device=hidden.device) for name in ("ce", "soft_ce", "l1", "top1")}
        grad_hidden = torch.zeros_like(hidden)
        grad_feature = None if feature is None else torch.zeros_like(feature)
        grad_w2 = None if w2 is None else torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        grad_head = torch.zeros(lm_head.shape, device=lm_head.device) if ctx.needs_input_grad[2] else None
        for start in range(0, n, CHUNK):
            index = order[start : start + CHUNK]
            u, f = hidden[index], None if feature is None else feature[index]
            base = softcap(u @ lm_head.T, cap)
            logits = base if f is None or w2 is None else base + f @ w2.T
            losses, grad = _chunk(logits.float(), head, targets, index, mix)
            for name, value in losses.items():
                rows[name][index] = value
            grad = grad.to(hidden.dtype)
            through_cap = grad if cap is None else grad * (1 - (base / cap) ** 2)
            grad_hidden[index] = through_cap @ lm_head
            if f is not None and w2 is not None and grad_feature is not None and grad_w2 is not None:
                grad_feature[index] = grad @ w2
                grad_w2 += grad.T @ f
            if grad_head is not None:
                grad_head += through_cap.T @ u
        ctx.save_for_backward(grad_hidden, grad_feature, grad_head, grad_w2)
        weighted = mix.ce * rows["ce"] + mix.soft_ce * rows["soft_ce"] + mix.l1 * rows["l1"]
        outputs = ((targets.weight * weighted).sum(), rows["ce"], rows["soft_ce"], rows["l1"], rows["top1"])
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        scale = grads[0]
        scaled = (None if g is None else g * scale for g in ctx.saved_tensors)
        return (*scaled, *(None,) * 6)


def _chunk(
    logits: Tensor, head: HeadWeights, targets: SlotTargets, index: Tensor, mix: LossMix
) -> tuple[dict[str, Tensor], Tensor]:
    """One chunk: draft logits [C, Vd] fp32 -> per-slot losses [C] and the gradient of their weighted sum [C, Vd]."""
    unique, inverse = torch.unique_consecutive(targets.position[index], return_inverse=True)
    rows = head.lm_head if head.target_lm_head is None else head.target_lm_head
    target_logits = softcap(targets.hidden[unique] @ rows.T, head.target_cap).float()
    best = argmax(target_logits)[inverse]
    p = torch.exp(target_logits - targets.log_normalizer[unique, None])
    inside = p.sum(dim=-1)[inverse]  # target mass on the draft vocabulary; the rest can never be drafted
    p = p[inverse]
    top1 = (argmax(logits) == best).float()
    log_q = F.log_softmax(logits, dim=-1)
    q = log_q.exp()
    label, weight = targets.label[index], targets.weight[index, None]
    known = label >= 0
    ce = torch.where(known, -log_q.gather(1, label.clamp(min=0)[:, None])[:, 0], 0.0)
    gap = q - p
    losses = {
        "ce": ce,
        "soft_ce": -torch.linalg.vecdot(p, log_q) if mix.soft_ce else torch.zeros_like(ce),
        "l1": gap.abs().sum(dim=-1) + (1 - inside).clamp(min=0),
        "top1": top1,
    }
    # The gradient of the sum is q * (l1 * (sign - E_q[sign]) + soft * inside + ce) - soft * p - ce * [label], made in
    # place: passes over [C, Vd] cost as much as the products.
    if mix.l1:
        grad = gap.sign_()
        grad.sub_(torch.linalg.vecdot(q, grad)[:, None]).mul_(mix.l1)
    else:
        grad = gap.zero_()
    grad.add_(mix.soft_ce * inside[:, None] + mix.ce * known.to(q.dtype)[:, None]).mul_(q)
    if mix.soft_ce:
        grad.sub_(p, alpha=mix.soft_ce)
    if mix.ce:
        grad.scatter_add_(1, label.clamp(min=0)[:, None], -mix.ce * known.to(q.dtype)[:, None])
    return losses, grad.mul_(weight)


def confidence_loss(logits: Tensor, l1: Tensor, weight: Tensor) -> Tensor:
    """Weighted SUM of the cross-entropy of confidence logits [N] against 1 - L1/2 (paper equation 8), detached."""
    accept = (1 - l1.detach() / 2).clamp(0, 1)
    return (weight * F.binary_cross_entropy_with_logits(logits, accept, reduction="none")).sum()
