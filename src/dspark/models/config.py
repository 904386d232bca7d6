"""What describes a decoder: sizes and the few switches in which the families differ. Hugging Face names; no torch."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dspark.config import Settings

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "proportional"]
LayerType = Literal["full_attention", "sliding_attention"]
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
CaptureName = Literal["auto", "decoder", "transformers"]
"""What runs a target for its states: our decoder, transformers, or our decoder where it knows the architecture."""


def _added(default: Any, **limits: Any) -> Any:
    """A field that came later: it is left out where it has its default, so that digests made before it still hold."""
    return Field(default=default, exclude_if=lambda value: value == default, **limits)


class RopeConfig(Settings):
    """Rotary position embedding: base, and how the frequencies are stretched for contexts longer than trained.

    Fields that the `rope_type` does not use stay None. `max_position_embeddings` is the length from which `dynamic`
    begins to stretch; `original_max_position_embeddings` is the trained length of `llama3` and `yarn`;
    `partial_rotary_factor` is the share of a head's planes that `proportional` turns.
    """

    rope_type: RopeType = "default"
    rope_theta: float = Field(default=10_000.0, gt=0)
    factor: float | None = Field(default=None, gt=0)
    max_position_embeddings: int | None = Field(default=None, gt=0)
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float | None = _added(None, gt=0, le=1)

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        needed = {
            "default": (),
            "linear": ("factor",),
            "dynamic": ("factor", "max_position_embeddings"),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
            "proportional": ("partial_rotary_factor",),
        }[self.rope_type]
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs {name!r}")
        return self


class MoeConfig(Settings):
    """A sparse MLP: the router sends each token to the `num_experts_per_tok` experts that it scores highest."""

    num_experts: int = Field(gt=0)
    num_experts_per_tok: int = Field(gt=0)
    moe_intermediate_size: int = Field(gt=0)
    norm_topk_prob: bool = False
    """Whether the weights of the chosen experts are scaled to the sum 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that keep a dense MLP of `intermediate_size`."""

    @model_validator(mode="after")
    def _has_enough_experts(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok ({self.num_experts_per_tok}) is above num_experts")
        return self


class DecoderConfig(Settings):
    """Everything that determines a decoder's computation. Two models with equal configs differ in weights alone."""

    architecture: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = Field(gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation (Qwen3)."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Keys that a row of a sliding layer sees, its own included."""
    layer_types: tuple[LayerType, ...]
    hidden_act: Activation = "silu"
    norm_style: Literal["rms", "rms_plus_one"] = "rms"
    """`rms_plus_one`: files store a norm's weight less one (Gemma 3)."""
    eos_token_ids: tuple[int, ...] = ()
    sandwich_norms: bool = _added(False)
    """Norms also on what attention and MLP give, before it joins the residual stream (Gemma)."""
    scale_embeddings: bool = _added(False)
    """Embeddings are multiplied by the square root of `hidden_size` (Gemma)."""
    query_pre_attn_scalar: int | None = _added(None, gt=0)
    """Attention scores are divided by its square root; None: by that of the head dimension."""
    final_logit_softcapping: float | None = _added(None, gt=0)
    """Logits x become cap * tanh(x / cap)."""
    local_rope: RopeConfig | None = _added(None)
    """The rotation of sliding layers; None: `rope`, as for the others."""
    global_head_dim: int | None = _added(None, gt=0, multiple_of=2)
    """Head dimension of the full-attention layers; None: `head_dim`, as for the others."""
    num_global_key_value_heads: int | None = _added(None, gt=0)
    attention_k_eq_v: bool = _added(False)
    """Full-attention layers have no value projection: their values are the projected keys (Gemma 4)."""
    v_norm: bool = _added(False)
    """RMS norm of each value head, without a weight (Gemma 4)."""
    layer_scalar: bool = _added(False)
    """Each layer's output is multiplied by a stored number (Gemma 4)."""
    moe: MoeConfig | None = _added(None)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for name in ("num_key_value_heads", "num_global_key_value_heads"):
            heads = getattr(self, name)
            if heads is not None and self.num_attention_heads % heads:
                raise ValueError(
                    f"num_attention_heads ({self.num_attention_heads}) is not a multiple of {name} ({heads})"
                )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types names sliding_attention, but sliding_window is missing")
        if self.global_head_dim is not None and self.local_rope is None:
            raise ValueError("global_head_dim needs local_rope: one rotation cannot serve two head dimensions")
        return self

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer sees the last `sliding_window` keys only."""
        return self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None where it sees the whole context."""
        return self.sliding_window if self.is_sliding(layer) else None

    def head_dim_of(self, layer: int) -> int:
        """Return the head dimension of a layer."""
        return self.head_dim if self.global_head_dim is None or self.is_sliding(layer) else self.global_head_dim

    def kv_heads_of(self, layer: int) -> int:
        """Return the number of key/value heads of a layer."""
        heads = self.num_global_key_value_heads
        return self.num_key_value_heads if heads is None or self.is_sliding(layer) else heads

    def has_values(self, layer: int) -> bool:
        """Whether a layer projects values of its own, beside the keys."""
        return self.is_sliding(layer) or not self.attention_k_eq_v

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers
