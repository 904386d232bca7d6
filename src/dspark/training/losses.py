"""The drafter's losses, fused with the LM head in row chunks.

No [slots, vocabulary] tensor ever exists: each chunk of slots makes its draft and target logits, its losses and its
gradients in the same few buffers, so backward recomputes nothing. Chunks are runs of slots sorted by target position,
and slots that share a position share one row of target logits. Products are in autocast's dtype, all else in float32.

Shapes: N slots, M target positions, H hidden, r Markov rank, Vd draft vocabulary, C slots of one chunk.
Source: DSpark paper equations 9-12 (L1 without the one half in front; see the weights in `LossMix`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
    constant. Matrices may have any dtype.
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
        n, work = len(hidden), _Work.make(hidden, head)
        rows = {name: torch.zeros(n, device=hidden.device) for name in ("ce", "soft_ce", "l1", "top1")}
        grad_hidden = torch.zeros_like(hidden)
        grad_feature = None if feature is None else torch.zeros_like(feature)
        grad_w2 = None if head.markov_w2 is None else _zeros(head.markov_w2)
        grad_head = _zeros(head.lm_head) if ctx.needs_input_grad[2] else None
        for start in range(0, n, CHUNK):
            index = order[start : start + CHUNK]
            u = hidden[index].to(work.dtype)
            f = None if feature is None else feature[index].to(work.dtype)
            losses, scale, grad = _chunk(u, f, work, targets, index, mix)
            for name, value in losses.items():
                rows[name][index] = value
            if f is not None and work.markov_w2 is not None and grad_feature is not None and grad_w2 is not None:
                through = work.narrowed(grad)
                grad_feature[index] = (through @ work.markov_w2).mul_(scale).to(grad_feature.dtype)
                _add_product(grad_w2, through, (f * scale).to(work.dtype))
            if work.tanh is not None:
                grad.mul_(work.tanh[: len(index)].square_().neg_().add_(1))  # through the cap
            through = work.narrowed(grad)
            grad_hidden[index] = (through @ work.lm_head).mul_(scale).to(grad_hidden.dtype)
            if grad_head is not None:
                _add_product(grad_head, through, (u * scale).to(work.dtype))
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


class _Work(NamedTuple):
    """The matrices in the dtype of the products, and [C, Vd] float32 buffers.

    Every chunk uses the same ones: memory of that size is fresh each time it is asked for, and each page of it costs.
    """

    lm_head: Tensor  # [Vd, H]
    target_lm_head: Tensor  # [Vd, H]
    markov_w2: Tensor | None  # [Vd, r]
    draft_cap: float | None
    target_cap: float | None
    logits: Tensor
    q: Tensor
    p: Tensor
    target: Tensor  # a row for each target position
    narrow: Tensor | None  # in the products' dtype, where that is not float32
    tanh: Tensor | None  # of the draft logits over their cap

    @classmethod
    def make(cls, hidden: Tensor, head: HeadWeights) -> _Work:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        lm_head, w2 = head.lm_head.to(dtype), head.markov_w2
        shape = min(CHUNK, len(hidden)), len(lm_head)
        buffers = [torch.empty(shape, device=hidden.device) for _ in range(4 if head.draft_cap is None else 5)]
        return cls(
            lm_head,
            lm_head if head.target_lm_head is None else head.target_lm_head.to(dtype),
            None if w2 is None else w2.to(dtype),
            head.draft_cap,
            head.target_cap,
            logits=buffers[0],
            q=buffers[1],
            p=buffers[2],
            target=buffers[3],
            narrow=None if dtype == torch.float32 else torch.empty(shape, dtype=dtype, device=hidden.device),
            tanh=buffers[4] if len(buffers) == 5 else None,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products."""
        return self.lm_head.dtype

    def product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """x @ weight.T in the first rows of `out`: x [n, k] -> [n, Vd]."""
        if self.narrow is None:
            return torch.mm(x, weight.T, out=out[: len(x)])
        return out[: len(x)].copy_(torch.mm(x, weight.T, out=self.narrow[: len(x)]))

    def narrowed(self, x: Tensor) -> Tensor:
        """x [n, Vd] in the dtype of the products."""
        return x if self.narrow is None else self.narrow[: len(x)].copy_(x)

    def draft_logits(self, u: Tensor, f: Tensor | None) -> Tensor:
        """u [n, H], f [n, r] -> [n, Vd], in `logits`."""
        logits = self.product(u, self.lm_head, self.logits)
        if self.draft_cap is not None and self.tanh is not None:
            torch.tanh(logits.div_(self.draft_cap), out=self.tanh[: len(u)])
            torch.mul(self.tanh[: len(u)], self.draft_cap, out=logits)
        if f is None or self.markov_w2 is None:
            return logits
        if self.narrow is None:
            return logits.addmm_(f, self.markov_w2.T)
        return logits.add_(self.product(f, self.markov_w2, self.q))

    def target_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> [n, Vd], in `target`."""
        logits = self.product(hidden.to(self.dtype), self.target_lm_head, self.target)
        return logits if self.target_cap is None else logits.div_(self.target_cap).tanh_().mul_(self.target_cap)


def _chunk(
    u: Tensor, f: Tensor | None, work: _Work, targets: SlotTargets, index: Tensor, mix: LossMix
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """One chunk: u [C, H] and f [C, r] -> per-slot losses [C], and the gradient of their weighted sum by the logits.

    The gradient is a factor a slot [C, 1], for the caller to apply where rows are short, times a buffer [C, Vd].
    """
    logits = work.draft_logits(u, f)
    best = argmax(logits)[:, None]
    q = torch.softmax(logits, dim=-1, out=work.q[: len(u)])
    log_z = logits.gather(1, best) - q.gather(1, best).log()  # [C, 1]
    unique, inverse = torch.unique_consecutive(targets.position[index], return_inverse=True)
    law = work.target_logits(targets.hidden[unique])
    top1 = (best[:, 0] == argmax(law)[inverse]).float()
    law.sub_(targets.log_normalizer[unique, None]).exp_()
    inside = law.sum(dim=-1)[inverse]  # target mass on the draft vocabulary; the rest can never be drafted
    p = torch.index_select(law, 0, inverse, out=work.p[: len(u)])
    scratch = work.target[: len(u)]
    label = targets.label[index][:, None]
    known = (label >= 0).float()
    ce = (known * (log_z - logits.gather(1, label.clamp(min=0))))[:, 0]
    soft_ce = torch.zeros_like(ce)
    if mix.soft_ce:
        soft_ce = inside * log_z[:, 0] - torch.mul(p, logits, out=scratch).sum(dim=-1)
    gap = torch.sub(q, p, out=logits)
    l1 = torch.linalg.vector_norm(gap, ord=1, dim=-1) + (1 - inside).clamp(min=0)
    losses = {"ce": ce, "soft_ce": soft_ce, "l1": l1, "top1": top1}
    # By the logits: q * (a_l1 (sign - E_q[sign]) + a_soft inside + a_ce known) - a_soft p - a_ce [label], divided here
    # by the factor, and made in place: passes over [C, Vd] cost as much as the products.
    factor = mix.l1 or 1.0
    constant = (mix.soft_ce * inside[:, None] + mix.ce * known) / factor
    if mix.l1:
        grad = gap.sign_()
        constant -= torch.mul(q, grad, out=scratch).sum(dim=-1, keepdim=True)
    else:
        grad = gap.zero_()
    grad.add_(constant).mul_(q)
    if mix.soft_ce:
        grad.sub_(p, alpha=mix.soft_ce / factor)
    if mix.ce:
        grad.scatter_add_(1, label.clamp(min=0), -mix.ce / factor * known)
    return losses, factor * targets.weight[index, None], grad


def _zeros(like: Tensor) -> Tensor:
    """A float32 sum over chunks, for a parameter's gradient."""
    return torch.zeros(like.shape, device=like.device)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [Vd, k] += left.T @ right, left [C, Vd], right [C, k]."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right


def confidence_loss(logits: Tensor, l1: Tensor, weight: Tensor) -> Tensor:
    """Weighted SUM of the cross-entropy of confidence logits [N] against 1 - L1/2 (paper equation 8), detached."""
    accept = (1 - l1.detach() / 2).clamp(0, 1)
    return (weight * F.binary_cross_entropy_with_logits(logits, accept, reduction="none")).sum()
