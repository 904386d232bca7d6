"""What drafters are made of: fused target features, draft layers, and the parallel backbone of a block drafter.

Shapes: B sequences, S context tokens, A anchors, Q rows of one block (anchor and masks), N flat rows, m tapped target
layers, H hidden, h/hk query and key heads, D head size. Source: DFlash (arXiv 2602.06036), DSpark paper section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.drafters.block_attention import AttentionKind, KeysValues, Mask, Visibility, attend, make_mask
from dspark.drafters.config import DrafterConfig
from dspark.models import rope
from dspark.models.attention import AttentionBatch, paged_attention
from dspark.models.kv_cache import PagedKVCache
from dspark.models.mlp import activation
from dspark.models.rope import RotaryEmbedding, Rotation


class RMSNorm(nn.RMSNorm):
    """In its weight's dtype: float32 in training, whatever autocast has made of what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


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
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
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

    def attend(self, q: Tensor, context: KeysValues, own: KeysValues, mask: Mask) -> Tensor:
        """Training: queries [B, A, Q, h, D], context rows [B, S, ..], each anchor's own rows [B, A, R, ..].

        Returns [B, A, Q, H].
        """
        return self.o_proj(attend(q, context, own, mask, self.scale))  # type: ignore[no-any-return]


class BlockView(NamedTuple):
    """What a draft layer needs of a `BlockGeometry`: rotations of the block's and the context's rows, and the mask."""

    block_rotation: Rotation
    context_rotation: Rotation
    mask: Mask


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
        starts = segment_starts(segment_ids)  # [B, S]
        first = starts.gather(1, anchors)  # [B, A]
        context_positions = torch.arange(segment_ids.shape[1], device=anchors.device) - starts
        positions = (anchors - first)[..., None] + rows
        positions = positions.clamp(max=config.max_position_embeddings - 1)  # [B, A, Q]
        self.block_rotation = rotary(positions, dtype)
        self.context_rotation = rotary(context_positions, dtype)
        causal = config.block_attention == "causal"
        self.visible = Visibility(first, anchors, positions, context_positions, causal=causal)
        self._views: dict[int | None, BlockView] = {}

    def view(self, window: int | None, kind: AttentionKind) -> BlockView:
        """What a layer with that attention window needs; made once."""
        if window not in self._views:
            mask = make_mask(kind, self.visible._replace(window=window), self.visible.positions.shape[2])
            self._views[window] = BlockView(self.block_rotation, self.context_rotation, mask)
        return self._views[window]


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Where the conversation that a token belongs to begins in its row: [B, S] -> [B, S]."""
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return torch.where(begins, places, 0).cummax(dim=1).values


class DraftLayer(nn.Module):
    """Pre-norm attention and gated MLP; names as in `models.decoder.DecoderLayer`. `forward` is what training runs."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = DraftAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
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
            self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
            self.post_feedforward_layernorm = RMSNorm(hidden, eps)
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


class BlockLayer(DraftLayer):
    """A layer of a block drafter."""

    def forward(self, x: Tensor, context: Tensor, view: BlockView) -> Tensor:
        """Training: x [B, A, Q, H] and context [B, S, H] -> [B, A, Q, H], every block on its own."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        own = attention.keys_values(normed, view.block_rotation)
        seen = attention.keys_values(context, view.context_rotation)
        q = attention.queries(normed, view.block_rotation)
        return self.after_attention(x, attention.attend(q, seen, own, view.mask))


class Execution(NamedTuple):
    """How training runs the draft layers. Results differ in rounding only."""

    attention: AttentionKind = "matmul"
    checkpointing: bool = False  # keep a layer's inputs alone and run it again in backward


class FeatureFusion(nn.Module):
    """What all drafters share: `fc` over the tapped target states, draft layers, and the norm before the LM head."""

    feature_scale: Tensor

    def __init__(self, config: DrafterConfig, layers: Iterable[DraftLayer]) -> None:
        super().__init__()
        self.config = config
        self.execution = Execution()
        hidden = config.hidden_size
        width = len(config.target_layer_ids) * hidden
        self.fc = nn.Linear(width, hidden, bias=False)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        # Training may divide features by their measured spread; writing a checkpoint folds this into fc.
        self.register_buffer("feature_scale", torch.ones(width), persistent=False)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a draft layer: the config's, or this process's share of them."""
        return next(module.num_kv_heads for module in self.modules() if isinstance(module, DraftAttention))

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped states [..., m, H] -> [..., H]."""
        flat = features.flatten(-2).to(self.norm.weight.dtype) * self.feature_scale.to(self.norm.weight.dtype)
        return self.fc(flat)  # type: ignore[no-any-return]

    def run_layer(self, layer: nn.Module, *inputs: Any) -> Any:
        """Training: what `layer` gives for `inputs`, as `execution` says."""
        if self.execution.checkpointing:
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)  # there is no dropout
        return layer(*inputs)

    def fold_scale(self) -> None:
        """Put the feature scale into `fc`: the same function, without the scale."""
        with torch.no_grad():
            self.fc.weight.mul_(self.feature_scale)
            self.feature_scale.fill_(1.0)


class Backbone(FeatureFusion):
    """`fc` + `hidden_norm` turn tapped target states into context features; the layers read them at every depth."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, (BlockLayer(config, i) for i in range(config.num_hidden_layers)))
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

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
            x = self.run_layer(layer, x, context, geometry.view(layer.self_attn.window, self.execution.attention))  # type: ignore[union-attr, arg-type]
        return self.norm(x)  # type: ignore[no-any-return]
