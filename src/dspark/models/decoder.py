"""The one decoder: every supported family is a `DecoderConfig`.

Shapes: B requests, T rows a request, H hidden size, Hq query heads, Hkv key/value heads, D head dimension,
I intermediate size, m taps, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models import rope
from dspark.models.attention import AttentionBatch, paged_attention
from dspark.models.config import DecoderConfig
from dspark.models.kv_cache import PagedKVCache


class DecoderOutput(NamedTuple):
    """What one forward gives."""

    hidden: Tensor  # [B, T, H], the residual stream after the last layer, before the final norm
    taps: Tensor  # [B, T, m, H], the residual stream after each tapped layer, in the order asked for


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.shape = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; queries, keys and values come from one fused projection."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.window(layer)
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        num_heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = nn.Linear(config.hidden_size, num_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * config.head_dim, config.hidden_size, bias=config.attention_output_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        heads = self.qkv_proj(x).view(*x.shape[:2], -1, self.head_dim)  # [B, T, Hq + 2 Hkv, D]
        qk, v = heads.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), 2)
        if self.qk_norm:
            q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), 2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 2)
        q, k = rope.apply(qk, cos, sin).split_with_sizes((self.num_heads, self.num_kv_heads), 2)
        batch.write(cache, self.layer, k, v)
        out: Tensor = self.o_proj(paged_attention(q, self.layer, cache, batch, self.window).flatten(2))
        return out


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [B, T, I] each
        out: Tensor = self.down_proj(activation(self.act, gate) * up)
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, batch, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """A causal language model that keeps its keys and values in a `PagedKVCache` and can be tapped at any layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden_size).uniform_(-0.05, 0.05)  # normal_ is slow on meta
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = rope.RotaryEmbedding(config.rope, config.head_dim)

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
            config.num_key_value_heads,
            config.head_dim,
            weight.dtype,
            weight.device,
        )

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, cache: PagedKVCache, taps: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """Run token_ids i64 [B, T] at the batch's positions and store their keys and values.

        `taps` names layers whose output is returned as well: id i is the output of layer i, -1 the embeddings.
        """
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(batch.positions, x.dtype)
        tapped = {-1: x} if -1 in taps else {}
        for layer, block in enumerate(self.layers):
            x = block(x, cos, sin, batch, cache)
            if layer in taps:
                tapped[layer] = x
        states = [tapped[layer] for layer in taps]
        return DecoderOutput(x, torch.stack(states, dim=2) if states else x.new_empty(*x.shape[:2], 0, x.shape[2]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of states [..., H] taken before the final norm."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def activation(name: str, x: Tensor) -> Tensor:
    """Apply the activation that `DecoderConfig.hidden_act` names."""
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_pytorch_tanh":
            return F.gelu(x, approximate="tanh")
    raise AssertionError(name)
