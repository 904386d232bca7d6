"""AdamW on float32 master weights and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from dspark.training.config import TrainSettings


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; matrices decay, norms, biases and embeddings do not.

    The parameters must be float32 (they are the master weights): bfloat16 ones would lose small updates.
    """
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for _, p in trained)
    decayed = [p for n, p in trained if p.ndim >= 2 and "markov_w1" not in n]
    plain = [p for n, p in trained if p.ndim < 2 or "markov_w1" in n]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """Linear warm-up over `warmup_ratio` of the steps, then a cosine down to `min_learning_rate_ratio`. step from 0."""
    warmup = max(1, round(settings.warmup_ratio * total_steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    floor = settings.min_learning_rate_ratio
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
