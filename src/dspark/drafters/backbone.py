"""What drafters are made of: fused target features, draft layers, and the parallel backbone of a block drafter.

Shapes: B sequences, S context tokens, A anchors, Q rows of one block (anchor and masks), N flat rows, m tapped target
layers, H hidden, h/hk query and key heads, D head size. Source: DFlash (arXiv 2602.06036), DSpark paper section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.models import rope
from dspark.models.attention import AttentionBatch, paged_attention
from dspark.models.kv_cache import PagedKVCache
from dspark.models.mlp import activation
from dspark.models.rope import RotaryEmbedding, Rotation


class KeysValues(NamedTuple):
    """Rotated keys and values of some rows, each [..., hk, D]."""

    keys: Tensor
    values: Tensor


class DraftAttention(nn.Module):
    """Queries come from the drafted rows; keys and values from the context AND from those rows."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        width = config.attention_width
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
        )
        self.layer, self.window = layer, config.window(layer)
        has_values = not config.attention_k_eq_v
        self.q_proj = nn.Linear(width, self.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * head_dim, bias=bias) if has_values else None
        self.o_proj = nn.Linear(self.num_heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        no_weight = nn.RMSNorm(head_dim, config.rms_norm_eps, elementwise_affine=False)
        self.v_norm = no_weight if config.layer_style == "gemma4" else nn.Identity()
        self.scale = config.attention_scale

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [..., width] -> rotated queries [..., h, D]."""
        return rope.apply(self.q_norm(self._heads(self.q_proj(x))), *rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeysValues:
        """x [..., width] -> rotated keys and values [..., hk, D]."""
        raw = self._heads(self.k_proj(x))
        values = raw if self.v_proj is None else self._heads(self.v_proj(x))
        return KeysValues(rope.apply(self.k_norm(raw), *rotation), self.v_norm(values))

    def _heads(self, x: Tensor) -> Tensor:
        """[..., h * D] -> [..., h, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def cached(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        """Serving: x [B, Q, width]; context keys are in the cache, the rows' own go into their provisional slots."""
        q = self.queries(x, rotation)
        k, v = self.keys_values(x, rotation)
        batch.write(cache, self.layer, k, v)
        attended = paged_attention(q, self.layer, cache, batch, self.window, self.scale)
        return self.o_proj(attended.flatten(-2))  # type: ignore[no-any-return]

    def blocks(self, x: Tensor, context: Tensor, geometry: BlockGeometry) -> Tensor:
        """Training: x [B, A, Q, H] and context [B, S, H] -> [B, A, Q, H], every block on its own."""
        own = self.keys_values(x, geometry.block_rotation)
        seen = self.keys_values(context, geometry.context_rotation)
        q = self.queries(x, geometry.block_rotation)
        return self.attend(q, seen, own, geometry.context_bias(self.window), geometry.block_bias)

    def attend(
        self, q: Tensor, context: KeysValues, own: KeysValues, context_bias: Tensor, own_bias: Tensor | None = None
    ) -> Tensor:
        """Training: queries [B, A, Q, h, D], context rows [B, S, ..] and each anchor's own rows [B, A, R, ..].

        One softmax runs over the context scores [.., S] and the own scores [.., R] together; rows of other anchors
        never enter, so overlapping anchors cannot leak. Biases of 0 and -inf broadcast to the scores
        [B, hk, h / hk, A, Q, S or R]. Returns [B, A, Q, H].
        """
        groups = self.num_heads // self.num_kv_heads
        q = q.view(*q.shape[:-2], self.num_kv_heads, groups, self.head_dim)
        q = q.permute(0, 3, 4, 1, 2, 5) * self.scale  # [B, hk, g, A, Q, D]
        k, v = (t.permute(0, 3, 1, 2, 4) for t in own)  # [B, hk, A, R, D]
        ck, cv = (t.transpose(1, 2) for t in context)  # [B, hk, S, D]
        scores_context = (q.flatten(2, 4) @ ck.transpose(-1, -2)).view(q.shape[:-1] + (-1,))  # [B, hk, g, A, Q, S]
        scores_own = q @ k[:, :, None].transpose(-1, -2)  # [B, hk, g, A, Q, R]
        scores_context = scores_context + context_bias
        if own_bias is not None:
            scores_own = scores_own + own_bias
        length = ck.shape[2]
        scores = torch.cat([scores_context, scores_own], dim=-1)
        p = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
        from_context = (p[..., :length].flatten(2, 4) @ cv).view(q.shape[:-1] + (-1,))
        out = from_context + p[..., length:] @ v[:, :, None]
        return self.o_proj(out.permute(0, 3, 4, 1, 2, 5).flatten(3))  # type: ignore[no-any-return]


class BlockGeometry:
    """Positions, rotations and masks that all draft layers of one training step share.

    anchors [B, A] places in the row; segment_ids [B, S], the row's conversations; Q rows a block. A block sees its own
    conversation before its anchor (the anchor is row 0 of the block, never read from context) and its own rows: all of
    them, or those up to itself when causal. Positions count from the beginning of each conversation.
    """

    def __init__(
        self, config: DrafterConfig, rotary: RotaryEmbedding, anchors: Tensor, segment_ids: Tensor, dtype: torch.dtype
    ) -> None:
        rows = torch.arange(config.query_rows, device=anchors.device)
        self.places = torch.arange(segment_ids.shape[1], device=anchors.device)
        starts = segment_starts(segment_ids)  # [B, S]
        self.anchors, self.first = anchors, starts.gather(1, anchors)  # [B, A]: its conversation is [first, anchor)
        self.context_positions = self.places - starts  # [B, S]
        self.positions = (anchors - self.first)[..., None] + rows
        self.positions = self.positions.clamp(max=config.max_position_embeddings - 1)  # [B, A, Q]
        self.block_rotation = rotary(self.positions, dtype)
        self.context_rotation = rotary(self.context_positions, dtype)
        self.block_bias = None
        if config.block_attention == "causal":
            future = rows[None] > rows[:, None]
            self.block_bias = torch.zeros(future.shape, device=anchors.device).masked_fill(future, -math.inf)
        self._bias: dict[int | None, Tensor] = {}

    def context_bias(self, window: int | None) -> Tensor:
        """0 where a block row sees a context position and -inf elsewhere: [B, 1, 1, A, Q or 1, S]."""
        if window not in self._bias:
            own = (self.places >= self.first[..., None]) & (self.places < self.anchors[..., None])
            visible = own[:, :, None]  # [B, A, 1, S]
            if window is not None:
                visible = visible & (self.context_positions[:, None, None] > self.positions[..., None] - window)
            self._bias[window] = visibility_bias(visible)
        return self._bias[window]


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Where the conversation that a token belongs to begins in its row: [B, S] -> [B, S]."""
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return torch.where(begins, places, 0).cummax(dim=1).values


def visibility_bias(visible: Tensor) -> Tensor:
    """What is added to the context scores: bool [B, A, Q or 1, S] -> 0 and -inf, [B, 1, 1, A, Q or 1, S]."""
    bias = torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, -math.inf)
    return bias[:, None, None]


class DraftLayer(nn.Module):
    """Pre-norm attention and gated MLP over the block's rows; names as in `models.decoder.DecoderLayer`."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = DraftAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.act = config.hidden_act
        self.sandwich = config.layer_style == "gemma4"
        if self.sandwich:
            self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps)
            self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps)
            self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        gate = activation(self.act, self.mlp["gate_proj"](x))
        return self.mlp["down_proj"](gate * self.mlp["up_proj"](x))  # type: ignore[no-any-return]

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Both residual additions."""
        if self.sandwich:
            x = x + self.post_attention_layernorm(attended)
            fed = self.feed_forward(self.pre_feedforward_layernorm(x))
            return (x + self.post_feedforward_layernorm(fed)) * self.layer_scalar  # type: ignore[no-any-return]
        x = x + attended
        return x + self.feed_forward(self.post_attention_layernorm(x))


class FeatureFusion(nn.Module):
    """What all drafters share: `fc` over the tapped target states, draft layers, and the norm before the LM head."""

    feature_scale: Tensor

    def __init__(self, config: DrafterConfig, layers: Iterable[DraftLayer]) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        width = len(config.target_layer_ids) * hidden
        self.fc = nn.Linear(width, hidden, bias=False)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        # Training may divide features by their measured spread; writing a checkpoint folds this into fc.
        self.register_buffer("feature_scale", torch.ones(width), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped states [..., m, H] -> [..., H]."""
        flat = features.flatten(-2).to(self.norm.weight.dtype) * self.feature_scale.to(self.norm.weight.dtype)
        return self.fc(flat)  # type: ignore[no-any-return]

    def fold_scale(self) -> None:
        """Put the feature scale into `fc`: the same function, without the scale."""
        with torch.no_grad():
            self.fc.weight.mul_(self.feature_scale)
            self.feature_scale.fill_(1.0)


class Backbone(FeatureFusion):
    """`fc` + `hidden_norm` turn tapped target states into context features; the layers read them at every depth."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, (DraftLayer(config, i) for i in range(config.num_hidden_layers)))
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project_context(self, features: Tensor) -> Tensor:
        """Tapped states [..., m, H] -> context features [..., H]."""
        return self.hidden_norm(self.fuse(features))  # type: ignore[no-any-return]

    def inject(self, features: Tensor, positions: Tensor, slots: Tensor, cache: PagedKVCache) -> None:
        """Write the context keys and values of committed rows: features [N, m, H], positions and slots [N]."""
        context = self.project_context(features)
        rotation = self.rotary(positions, context.dtype)
        for i, layer in enumerate(self.layers):
            k, v = layer.self_attn.keys_values(context, rotation)  # type: ignore[union-attr, operator]
            cache.write(i, slots, k, v)

    def draft(self, embedded: Tensor, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        """Serving: embedded block rows [B, Q, H] -> final normed hidden [B, Q, H]."""
        rotation = self.rotary(batch.positions, embedded.dtype)
        x = embedded
        for layer in self.layers:
            attended = layer.self_attn.cached(layer.input_layernorm(x), rotation, batch, cache)  # type: ignore[union-attr, operator]
            x = layer.after_attention(x, attended)  # type: ignore[operator]
        return self.norm(x)  # type: ignore[no-any-return]

    def train_blocks(self, embedded: Tensor, features: Tensor, anchors: Tensor, segment_ids: Tensor | None) -> Tensor:
        """Training: embedded [B, A, Q, H], features [B, S, m, H], anchors [B, A] -> normed hidden [B, A, Q, H].

        segment_ids [B, S] tell the conversations of a row apart; None: one a row.
        """
        context = self.project_context(features)
        if segment_ids is None:
            segment_ids = anchors.new_zeros(features.shape[:2])
        geometry = BlockGeometry(self.config, self.rotary, anchors, segment_ids, embedded.dtype)
        x = embedded
        for layer in self.layers:
            attended = layer.self_attn.blocks(layer.input_layernorm(x), context, geometry)  # type: ignore[union-attr, operator]
            x = layer.after_attention(x, attended)  # type: ignore[operator]
        return self.norm(x)  # type: ignore[no-any-return]
