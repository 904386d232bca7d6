"""From cached samples to one training batch: padding, anchors and the labels of every draft slot.

Shapes: B sequences, S tokens, m tapped layers, H hidden, A anchors, G draft slots.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class TrainSample(Protocol):
    """One conversation with its target features, as the cache reader returns it."""

    @property
    def sample_id(self) -> int: ...
    @property
    def token_ids(self) -> Tensor: ...  # i32 [S]
    @property
    def loss_mask(self) -> Tensor: ...  # u8 [S]
    @property
    def features(self) -> Tensor: ...  # bf16 [S, m, H]
    @property
    def last_hidden(self) -> Tensor: ...  # bf16 [S, H], before the final norm
    @property
    def log_normalizer(self) -> Tensor | None: ...  # f32 [S]


class SampleSource(Protocol):
    """Random access to training samples."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> TrainSample: ...


class TrainBatch(NamedTuple):
    """A padded micro-batch with its anchors."""

    token_ids: Tensor  # i64 [B, S]
    features: Tensor  # [B, S, m, H]
    last_hidden: Tensor  # [B, S, H]
    log_normalizer: Tensor | None  # f32 [B, S]
    anchors: Tensor  # i64 [B, A]
    valid: Tensor  # bool [B, A]
    slot_mask: Tensor  # bool [B, A, G]: the slot's target is inside the anchor's supervised span

    def to(self, device: torch.device) -> TrainBatch:
        """The same batch on another device."""
        moved = {name: t.to(device, non_blocking=True) for name, t in self._asdict().items() if t is not None}
        return self._replace(**moved)


def anchor_candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Positions that may be anchors: supervised, and the next token supervised too. [S] -> [<= S] ascending.

    In serving the first answer token comes from prefill, so an anchor never sits on the prompt.
    """
    mask = loss_mask.astype(bool)
    return np.flatnonzero(mask[:-1] & mask[1:])


def sample_anchors(loss_mask: np.ndarray, num_anchors: int, rng: np.random.Generator) -> np.ndarray:
    """Up to `num_anchors` anchors without replacement, ascending."""
    candidates = anchor_candidates(loss_mask)
    if len(candidates) > num_anchors:
        candidates = rng.choice(candidates, num_anchors, replace=False)
    return np.sort(candidates)


def slot_mask(loss_mask: np.ndarray, anchors: np.ndarray, num_drafts: int) -> np.ndarray:
    """Which slots have a target: slot k of anchor a <-> token a+k+1, inside a's contiguous supervised span. [A, G]."""
    padded = np.concatenate([loss_mask.astype(bool), np.zeros(num_drafts + 1, dtype=bool)])
    inside = padded[anchors[:, None] + 1 + np.arange(num_drafts)]
    return np.logical_and.accumulate(inside, axis=1)


def collate(samples: list[TrainSample], num_anchors: int, num_drafts: int, rng: np.random.Generator) -> TrainBatch:
    """Pad samples to one length and draw their anchors. A sample with nothing to train keeps all-False masks."""
    batch, length = len(samples), max(len(s.token_ids) for s in samples)
    picked = [sample_anchors(s.loss_mask.numpy(), num_anchors, rng) for s in samples]
    width = max(1, max(len(a) for a in picked))
    anchors = torch.zeros(batch, width, dtype=torch.int64)
    valid = torch.zeros(batch, width, dtype=torch.bool)
    mask = torch.zeros(batch, width, num_drafts, dtype=torch.bool)
    for b, (sample, chosen) in enumerate(zip(samples, picked, strict=True)):
        anchors[b, : len(chosen)] = torch.from_numpy(chosen)
        valid[b, : len(chosen)] = True
        mask[b, : len(chosen)] = torch.from_numpy(slot_mask(sample.loss_mask.numpy(), chosen, num_drafts))
    normalizers = [s.log_normalizer for s in samples]
    return TrainBatch(
        token_ids=_pad([s.token_ids.long() for s in samples], length),
        features=_pad([s.features for s in samples], length),
        last_hidden=_pad([s.last_hidden for s in samples], length),
        log_normalizer=_pad([n for n in normalizers if n is not None], length) if None not in normalizers else None,
        anchors=anchors,
        valid=valid,
        slot_mask=mask,
    )


def slot_weights(mask: Tensor, decay: float) -> Tensor:
    """w_k = exp(-k / decay) where the slot has a target, else 0: bool [B, A, G] -> f32 [B, A, G]."""
    k = torch.arange(mask.shape[-1], dtype=torch.float32, device=mask.device)
    return torch.where(mask, torch.exp(-k / decay), 0.0)


def _pad(rows: list[Tensor], length: int) -> Tensor:
    out = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for b, row in enumerate(rows):
        out[b, : len(row)] = row
    return out
