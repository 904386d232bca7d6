"""Attention of drafted rows in training: plain products anywhere, flex attention on CUDA, behind one small interface.

Every anchor drafts on its own: its rows see its conversation before it and rows of its own, never another anchor's, so
overlapping anchors cannot leak.

Shapes: B sequences, S context tokens, A anchors, Q drafted rows and R own keys of an anchor, h/hk query and key heads,
D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

AttentionKind = Literal["matmul", "flex"]


class KeysValues(NamedTuple):
    """Rotated keys and values of some rows, each [..., hk, D]."""

    keys: Tensor
    values: Tensor


class Visibility(NamedTuple):
    """Which keys a drafted row sees: the context places [first, end) of its anchor, and its anchor's own rows.

    With a window w a row at position p sees context at positions > p - w only; causal own rows end with the row itself.
    """

    first: Tensor  # i64 [B, A]
    end: Tensor  # i64 [B, A]
    positions: Tensor  # i64 [B, A, Q]
    context_positions: Tensor  # i64 [B, S]
    window: int | None = None
    causal: bool = False


class MatmulMask(NamedTuple):
    """What is added to the scores, 0 and -inf."""

    context: Tensor  # [B, 1, 1, A, Q or 1, S]
    own: Tensor | None  # [Q, R]; None: every own row is seen


Mask = MatmulMask | BlockMask


def make_mask(kind: AttentionKind, visible: Visibility, num_own: int) -> Mask:
    """The mask of queries [B, A, Q] over the context and `num_own` own rows of each anchor, for `attend`."""
    match kind:
        case "matmul":
            return _matmul_mask(visible, num_own)
        case "flex":
            return _flex_mask(visible, num_own)


def attend(q: Tensor, context: KeysValues, own: KeysValues, mask: Mask, scale: float) -> Tensor:
    """Attend from q [B, A, Q, h, D] to context rows [B, S, ..] and each anchor's own rows [B, A, R, ..].

    One softmax runs over both. Query head i reads key head i // (h / hk). Returns [B, A, Q, h * D].
    """
    if isinstance(mask, MatmulMask):
        return _matmul(q, context, own, mask, scale)
    return _flex(q, context, own, mask, scale)


def _matmul_mask(visible: Visibility, num_own: int) -> MatmulMask:
    places = torch.arange(visible.context_positions.shape[1], device=visible.first.device)
    seen = (places >= visible.first[..., None]) & (places < visible.end[..., None])
    seen = seen[:, :, None]  # [B, A, 1, S]
    if visible.window is not None:
        seen = seen & (visible.context_positions[:, None, None] > visible.positions[..., None] - visible.window)
    own = None
    if visible.causal:
        rows = torch.arange(visible.positions.shape[2], device=places.device)
        own = _bias(torch.arange(num_own, device=places.device) <= rows[:, None])
    return MatmulMask(_bias(seen)[:, None, None], own)


def _bias(seen: Tensor) -> Tensor:
    """bool -> 0 where seen, -inf elsewhere."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)


def _matmul(q: Tensor, context: KeysValues, own: KeysValues, mask: MatmulMask, scale: float) -> Tensor:
    length, num_kv_heads, head_dim = context.keys.shape[1:]
    q = q.view(*q.shape[:-2], num_kv_heads, -1, head_dim)
    q = q.permute(0, 3, 4, 1, 2, 5) * scale  # [B, hk, g, A, Q, D]
    k, v = (t.permute(0, 3, 1, 2, 4) for t in own)  # [B, hk, A, R, D]
    ck, cv = (t.transpose(1, 2) for t in context)  # [B, hk, S, D]
    scores_context = (q.flatten(2, 4) @ ck.transpose(-1, -2)).view(q.shape[:-1] + (-1,))  # [B, hk, g, A, Q, S]
    scores_own = q @ k[:, :, None].transpose(-1, -2)  # [B, hk, g, A, Q, R]
    scores_context = scores_context + mask.context
    if mask.own is not None:
        scores_own = scores_own + mask.own
    scores = torch.cat([scores_context, scores_own], dim=-1)
    p = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
    from_context = (p[..., :length].flatten(2, 4) @ cv).view(q.shape[:-1] + (-1,))
    out = from_context + p[..., length:] @ v[:, :, None]
    return out.permute(0, 3, 4, 1, 2, 5).flatten(3)


def _flex_mask(visible: Visibility, num_own: int) -> BlockMask:
    """Keys are the context and behind it the own rows of all anchors; queries are the rows of all anchors."""
    first, end, positions, context_positions, window, causal = visible
    (batch, anchors, rows), length = positions.shape, context_positions.shape[1]
    flat = positions.flatten(1)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor, own = query // rows, key - length
        place = key.clamp(max=length - 1)
        context = (key < length) & (key >= first[b, anchor]) & (key < end[b, anchor])
        if window is not None:
            context = context & (context_positions[b, place] > flat[b, query] - window)
        mine = (own >= 0) & (own // num_own == anchor)
        if causal:
            mine = mine & (own % num_own <= query % rows)
        return context | mine

    make = _on_device(create_block_mask, first.device)
    mask: BlockMask = make(seen, batch, None, anchors * rows, length + anchors * num_own, device=first.device)
    return mask


def _flex(q: Tensor, context: KeysValues, own: KeysValues, mask: BlockMask, scale: float) -> Tensor:
    keys, values = (torch.cat([c, o.flatten(1, 2)], dim=1) for c, o in zip(context, own, strict=True))
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    # [B, h, A * Q, D] and twice [B, hk, S + A * R, D], of one dtype: norms and rotations leave others under autocast
    rows, keys, values = (t.transpose(1, 2).to(dtype) for t in (q.flatten(1, 2), keys, values))
    run = _on_device(flex_attention, q.device)
    out: Tensor = run(rows, keys, values, block_mask=mask, scale=scale, enable_gqa=rows.shape[1] != keys.shape[1])
    return out.transpose(1, 2).reshape(*q.shape[:3], -1)


def _on_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function compiled into a fused kernel on CUDA; elsewhere as it is, for comparison with the other kind."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
