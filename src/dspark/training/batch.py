"""From samples to one training batch: packing, padding, anchors and the labels of every draft slot.

Shapes: B rows, S tokens, m tapped layers, H hidden, A anchors, G draft slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class TrainRow(Protocol):
    """One conversation without the target's states."""

    @property
    def token_ids(self) -> Tensor: ...  # i32 [S]
    @property
    def loss_mask(self) -> Tensor: ...  # u8 [S]


class TrainSample(TrainRow, Protocol):
    """One conversation with the target's states."""

    @property
    def sample_id(self) -> int: ...
    @property
    def features(self) -> Tensor: ...  # bf16 [S, m, H]
    @property
    def last_hidden(self) -> Tensor: ...  # bf16 [S, H], before the final norm, or after it with post_norm
    @property
    def log_normalizer(self) -> Tensor | None: ...  # f32 [S]
    @property
    def post_norm(self) -> bool: ...


class SampleSource(Protocol):
    """Random access to training samples, wherever their states come from: a cache, the target itself, or both.

    Sample i is always the same one, so that a run can be resumed.
    """

    def __len__(self) -> int: ...
    @property
    def lengths(self) -> np.ndarray: ...  # i64 [n], token counts
    def row(self, index: int) -> TrainRow: ...  # cheap: no states are read or made
    def load(self, indices: Sequence[int]) -> Sequence[TrainSample]: ...  # one micro-batch, in the order asked for


class TrainBatch(NamedTuple):
    """A padded micro-batch with its anchors. A row holds one conversation, or several one behind the other."""

    token_ids: Tensor  # i64 [B, S]
    segment_ids: Tensor  # i64 [B, S]: which of its row's conversations a token belongs to, -1 in padding
    features: Tensor  # [B, S, m, H]
    last_hidden: Tensor  # [B, S, H]
    log_normalizer: Tensor | None  # f32 [B, S]
    anchors: Tensor  # i64 [B, A], places in the row
    valid: Tensor  # bool [B, A]
    slot_mask: Tensor  # bool [B, A, G]: the slot's target is inside the anchor's supervised span
    post_norm: bool  # whether last_hidden is after the target's final norm

    def to(self, device: torch.device) -> TrainBatch:
        """The same batch on another device."""
        tensors = {name: t for name, t in self._asdict().items() if isinstance(t, Tensor)}
        moved: dict[str, Any] = {name: t.to(device, non_blocking=True) for name, t in tensors.items()}
        return self._replace(**moved)


def anchor_candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Positions that may be anchors: supervised, and the next token supervised too. [S] -> [<= S] ascending.

    In serving the first answer token comes from prefill, so an anchor never sits on the prompt; a prompt has a token
    at least, so none sits at position 0.
    """
    mask = loss_mask.astype(bool)
    return np.flatnonzero(mask[1:-1] & mask[2:]) + 1


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


def collate(
    samples: Sequence[TrainSample],
    num_anchors: int,
    num_drafts: int,
    rng: np.random.Generator,
    tokens_per_row: int | None = None,
) -> TrainBatch:
    """Draw the samples' anchors and lay them out in rows, padded to one length.

    With `tokens_per_row` short conversations share a row; the anchors are those of a row each. A sample with nothing to
    train keeps all-False masks.
    """
    picked = [sample_anchors(s.loss_mask.numpy(), num_anchors, rng) for s in samples]
    lengths = [len(s.token_ids) for s in samples]
    rows = pack_rows(lengths, tokens_per_row)
    width = max(1, *(sum(len(picked[i]) for i in row) for row in rows))
    anchors = torch.zeros(len(rows), width, dtype=torch.int64)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    mask = torch.zeros(len(rows), width, num_drafts, dtype=torch.bool)
    segment_ids = torch.full((len(rows), max(sum(lengths[i] for i in row) for row in rows)), -1)
    for b, row in enumerate(rows):
        start, used = 0, 0
        for segment, i in enumerate(row):
            chosen, place = picked[i], slice(used, used + len(picked[i]))
            anchors[b, place] = torch.from_numpy(chosen) + start
            valid[b, place] = True
            mask[b, place] = torch.from_numpy(slot_mask(samples[i].loss_mask.numpy(), chosen, num_drafts))
            segment_ids[b, start : start + lengths[i]] = segment
            start, used = start + lengths[i], used + len(chosen)
    normalizers = [s.log_normalizer for s in samples if s.log_normalizer is not None]
    conventions = {s.post_norm for s in samples}
    assert len(conventions) == 1, "last_hidden is before the final norm in some samples and after it in others"
    return TrainBatch(
        token_ids=_fill([s.token_ids.long() for s in samples], rows, segment_ids),
        segment_ids=segment_ids,
        features=_fill([s.features for s in samples], rows, segment_ids),
        last_hidden=_fill([s.last_hidden for s in samples], rows, segment_ids),
        log_normalizer=_fill(normalizers, rows, segment_ids) if len(normalizers) == len(samples) else None,
        anchors=anchors,
        valid=valid,
        slot_mask=mask,
        post_norm=conventions.pop(),
    )


def pack_rows(lengths: Sequence[int], tokens_per_row: int | None) -> list[list[int]]:
    """Which conversations share a row: the longest first, each into the first row with room; None: one a row.

    A conversation longer than `tokens_per_row` has a row of its own.
    """
    if tokens_per_row is None:
        return [[i] for i in range(len(lengths))]
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            rows.append([i])
            room.append(tokens_per_row - lengths[i])
        else:
            rows[place].append(i)
            room[place] -= lengths[i]
    return rows


def slot_weights(mask: Tensor, decay: float) -> Tensor:
    """w_k = exp(-k / decay) where the slot has a target, else 0: bool [B, A, G] -> f32 [B, A, G]."""
    k = torch.arange(mask.shape[-1], dtype=torch.float32, device=mask.device)
    return torch.where(mask, torch.exp(-k / decay), 0.0)


def _fill(parts: list[Tensor], rows: list[list[int]], segment_ids: Tensor) -> Tensor:
    """Lay the parts of each row one behind the other: [B, S, ...], zeros in padding."""
    out = parts[0].new_zeros(*segment_ids.shape, *parts[0].shape[1:])
    for b, row in enumerate(rows):
        start = 0
        for i in row:
            out[b, start : start + len(parts[i])] = parts[i]
            start += len(parts[i])
    return out
