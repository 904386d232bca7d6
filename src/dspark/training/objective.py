"""One micro-batch through the drafter: from tensors to loss sums and metric sums.

Every value is a (sum, weight) pair: the trainer divides once, by the sums of the whole global batch.
Shapes: B sequences, S tokens, A anchors, G draft slots, N slots with a target, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dspark.drafters.base import Drafter
from dspark.models.ends import TargetEnds
from dspark.models.layers import softcap
from dspark.training.batch import TrainBatch, slot_weights
from dspark.training.config import LossMix
from dspark.training.losses import HeadWeights, SlotLosses, SlotTargets, confidence_loss, draft_losses

LOG_NORMALIZER_ROWS = 256


class Objective(NamedTuple):
    """`loss` is the weighted SUM whose gradient is taken; `metrics` are (numerator, denominator) by name."""

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


class Weighting(NamedTuple):
    """What a run weighs: the loss terms, the slots, and which labels the draft vocabulary holds."""

    mix: LossMix
    decay: float  # slot k weighs exp(-k / decay)
    draft_index: Tensor | None  # [V] target id -> draft index, -1 outside the draft vocabulary; None: same vocabulary


class TrainStep(nn.Module):
    """`micro_objective` as a module, so that whatever shards or gathers parameters surrounds every use of them."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, target: TargetEnds, batch: TrainBatch, weighting: Weighting) -> Objective:
        return micro_objective(self.drafter, target, batch, weighting)


def micro_objective(drafter: Drafter, target: TargetEnds, batch: TrainBatch, weighting: Weighting) -> Objective:
    """Losses and metrics of one micro-batch. A chain's steps are its slots, so that all drafters share the terms."""
    mask, (mix, decay, draft_index) = batch.slot_mask, weighting
    hidden = drafter.train_hidden(batch.token_ids, batch.features, batch.anchors, batch.valid, batch.segment_ids)
    offsets = batch.anchors[..., None] + torch.arange(mask.shape[-1], device=mask.device)  # [B, A, G]
    offsets = offsets.clamp(max=batch.token_ids.shape[1] - 2)
    previous = batch.token_ids.gather(1, offsets.flatten(1)).view_as(offsets)
    label = batch.token_ids.gather(1, (offsets + 1).flatten(1)).view_as(offsets)[mask]
    feature = embedded = None
    head = drafter.markov_head
    if head is not None:
        feature, embedded = head.block(previous.flatten(0, 1), hidden.flatten(0, 1))
        feature, embedded = feature.view(*mask.shape, -1)[mask], embedded.view(*mask.shape, -1)[mask]
    rows = torch.arange(len(mask), device=mask.device)[:, None, None] * batch.token_ids.shape[1]
    weight = slot_weights(mask, decay)[mask]
    targets = SlotTargets(
        *_target_rows(target, batch),
        position=(offsets + rows)[mask],
        label=label if draft_index is None else draft_index[label],
        weight=weight,
    )
    weights = HeadWeights(
        drafter.lm_head_weight,
        None if head is None else head.markov_w2.weight,
        drafter.target_lm_head_weight if drafter.config.own_lm_head else None,
        drafter.config.final_logit_softcapping,
        target.config.final_logit_softcapping,
    )
    slots = draft_losses(hidden[mask], feature, weights, targets, mix)
    loss, confidence = slots.total, None
    if drafter.confidence_head is not None:
        confidence = drafter.confidence_head(hidden[mask], embedded)
        loss = loss + mix.confidence * confidence_loss(confidence, slots.l1, weight)
    return Objective(loss, _metrics(slots, weight, mask, confidence))


def _target_rows(target: TargetEnds, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """The target's final-normed hidden states [B*S, H] and their full-vocabulary log normalizers [B*S]."""
    with torch.no_grad():
        weight = target.lm_head_weight
        states = batch.last_hidden.to(weight.dtype)
        normed = (states if batch.post_norm else target.norm(states)).flatten(0, 1)
        if batch.log_normalizer is not None:
            return normed, batch.log_normalizer.flatten()
        cap, chunks = target.config.final_logit_softcapping, normed.split(LOG_NORMALIZER_ROWS)
        return normed, torch.cat([softcap(c @ weight.T, cap).float().logsumexp(dim=-1) for c in chunks])


@torch.no_grad()
def _metrics(
    slots: SlotLosses, weight: Tensor, mask: Tensor, confidence: Tensor | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums for the log: loss terms, acceptance by position and the expected accepted length."""
    accept = (1 - slots.l1 / 2).clamp(0, 1)
    total = weight.sum()
    metrics = {
        "ce": ((weight * slots.ce).sum(), total),
        "l1": ((weight * slots.l1).sum(), total),
    }
    grid = {"accept": accept, "top1": slots.top1}
    anchors = mask.any(dim=-1).sum()
    for name, value in grid.items():
        full = torch.zeros(mask.shape, device=mask.device)
        full[mask] = value
        counts = mask.flatten(0, 1).sum(dim=0)
        for k, (numerator, count) in enumerate(zip(full.flatten(0, 1).sum(dim=0), counts, strict=True)):
            metrics[f"{name}/{k + 1}"] = (numerator, count)
        metrics["tau" if name == "accept" else "tau_greedy"] = (full.cumprod(dim=-1).sum() + anchors, anchors)
    if confidence is not None:
        predicted = torch.sigmoid(confidence)
        metrics["confidence_error"] = ((weight * (predicted - accept).abs()).sum(), total)
        metrics["confidence_bias"] = ((weight * (predicted - accept)).sum(), total)
    metrics["anchors"] = (anchors, torch.ones_like(anchors))
    return metrics
