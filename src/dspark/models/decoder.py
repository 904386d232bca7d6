"""The one decoder: every supported family is a `DecoderConfig`.

Shapes: B requests, T rows a request, H hidden size, Hq query heads, Hkv key/value heads, D head dimension,
m taps, V vocabulary. Hkv and D may differ between the layers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models import rope
from dspark.models.attention import AttentionBatch, PackedBatch, paged_attention
from dspark.models.config import DecoderConfig
from dspark.models.ends import Ends
from dspark.models.kv_cache import PagedKVCache
from dspark.models.layers import PlusOneRMSNorm, RMSNorm, ScaledEmbedding, softcap
from dspark.models.mlp import MLP, SparseMLP
from dspark.models.rope import Rotation


class DecoderOutput(NamedTuple):
    """What one forward gives."""

    hidden: Tensor  # [B, T, H], the residual stream after the last layer, before the final norm
    taps: Tensor  # [B, T, m, H], the residual stream after each tapped layer, in the order asked for


def norm(config: DecoderConfig, size: int) -> RMSNorm:
    """Return the family's norm over `size` components."""
    cls = PlusOneRMSNorm if config.norm_style == "rms_plus_one" else RMSNorm
    return cls(size, config.rms_norm_eps)


def embedding(config: DecoderConfig) -> nn.Embedding:
    """Return the family's embedding table, untrained."""
    table = torch.empty(config.vocab_size, config.hidden_size).uniform_(-0.05, 0.05)  # normal_ is slow on meta
    cls = ScaledEmbedding if config.scale_embeddings else nn.Embedding
    return cls(config.vocab_size, config.hidden_size, _weight=table)


def new_ends(config: DecoderConfig) -> Ends:
    """Return the ends of an untrained decoder; their parameters have the names that they have in the whole."""
    table = embedding(config)
    head = table.weight if config.tie_word_embeddings else torch.empty_like(table.weight)
    return Ends(config, table, norm(config, config.hidden_size), head)


class Attention(nn.Module):
    """Grouped-query attention; queries, keys and values come from one fused projection.

    A layer without values of its own (`attention_k_eq_v`) takes the projected keys for them, before norm and rotation.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.window(layer)
        self.head_dim = config.head_dim_of(layer)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.kv_heads_of(layer)
        self.num_value_heads = self.num_kv_heads if config.has_values(layer) else 0
        num_heads = self.num_heads + self.num_kv_heads + self.num_value_heads
        self.qkv_proj = nn.Linear(config.hidden_size, num_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_output_bias)
        scalar = config.query_pre_attn_scalar
        self.scale = None if scalar is None else scalar**-0.5
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = norm(config, self.head_dim)
            self.k_norm = norm(config, self.head_dim)
        self.v_norm_eps = config.rms_norm_eps if config.v_norm else None

    def forward(
        self, x: Tensor, rotation: Rotation, batch: AttentionBatch | PackedBatch, cache: PagedKVCache
    ) -> Tensor:
        heads = self.qkv_proj(x).view(*x.shape[:2], -1, self.head_dim)  # [B, T, Hq + 2 Hkv, D]
        qk, v = heads.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_value_heads), 2)
        if not self.num_value_heads:
            v = qk[:, :, self.num_heads :]
        if self.v_norm_eps is not None:
            v = F.rms_norm(v, (self.head_dim,), None, self.v_norm_eps)
        if self.qk_norm:
            q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), 2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 2)
        q, k = rope.apply(qk, *rotation).split_with_sizes((self.num_heads, self.num_kv_heads), 2)
        batch.write(cache, self.layer, k, v)
        attended = paged_attention(q, self.layer, cache, batch, self.window, self.scale)
        out: Tensor = self.o_proj(attended.flatten(2))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream and added to it.

    With `sandwich_norms` what they give is normalised too; the names are Hugging Face's, where
    `post_attention_layernorm` stands before the MLP without them and after the attention with them.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = norm(config, config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = norm(config, config.hidden_size)
        self.mlp = SparseMLP(config) if config.is_sparse(layer) else MLP(config)
        self.rotary = 0 if config.local_rope is None or not config.is_sliding(layer) else 1
        self.sandwich = config.sandwich_norms
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = norm(config, config.hidden_size)
            self.post_feedforward_layernorm = norm(config, config.hidden_size)
        self.layer_scalar = nn.Parameter(torch.ones(1)) if config.layer_scalar else None

    def forward(
        self, x: Tensor, rotations: list[Rotation], batch: AttentionBatch | PackedBatch, cache: PagedKVCache
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotations[self.rotary], batch, cache)
        if self.sandwich:
            x = x + self.post_attention_layernorm(attended)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
            return x if self.layer_scalar is None else x * self.layer_scalar
        x = x + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """A causal language model that keeps its keys and values in a `PagedKVCache` and can be tapped at any layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = norm(config, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotaries = [rope.RotaryEmbedding(config.rope, config.global_head_dim or config.head_dim)]
        if config.local_rope is not None:
            self.rotaries.append(rope.RotaryEmbedding(config.local_rope, config.head_dim))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the residual stream."""
        dtype: torch.dtype = self.embed_tokens.weight.dtype
        return dtype

    @property
    def lm_head_weight(self) -> Tensor:
        """The rows [V, H] that turn normed states into logits: the embedding table where the two are tied."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def new_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Return an empty cache that fits this decoder."""
        config, weight = self.config, self.embed_tokens.weight
        return PagedKVCache(
            config.num_hidden_layers,
            num_blocks,
            block_size,
            [module.num_kv_heads for module in self.modules() if isinstance(module, Attention)],
            [config.head_dim_of(layer) for layer in range(config.num_hidden_layers)],
            weight.dtype,
            weight.device,
        )

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch | PackedBatch, cache: PagedKVCache, taps: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """Run token_ids i64 [B, T] (packed, [1, P]) at the batch's positions and store their keys and values.

        `taps` names layers whose output is returned as well: id i is the output of layer i, -1 the embeddings.
        """
        x = self.embed_tokens(token_ids)
        rotations = [rotary(batch.positions, x.dtype) for rotary in self.rotaries]
        tapped = {-1: x} if -1 in taps else {}
        for layer, block in enumerate(self.layers):
            x = block(x, rotations, batch, cache)
            if layer in taps:
                tapped[layer] = x
        states = [tapped[layer] for layer in taps]
        return DecoderOutput(x, torch.stack(states, dim=2) if states else x.new_empty(*x.shape[:2], 0, x.shape[2]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of states [..., H] taken before the final norm."""
        return softcap(self.lm_head(self.norm(hidden)), self.config.final_logit_softcapping)
