"""What describes a decoder: sizes and the few switches in which the families differ. Hugging Face names; no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dspark.config import Settings

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
LayerType = Literal["full_attention", "sliding_attention"]
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


class RopeConfig(Settings):
    """Rotary position embedding: base, and how the frequencies are stretched for contexts longer than trained.

    Fields that the `rope_type` does not use stay None. `max_position_embeddings` is the length from which `dynamic`
    begins to stretch; `original_max_position_embeddings` is the trained length of `llama3` and `yarn`.
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

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        needed = {
            "default": (),
            "linear": ("factor",),
            "dynamic": ("factor", "max_position_embeddings"),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }[self.rope_type]
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs {name!r}")
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
    norm_style: Literal["rms"] = "rms"
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types names sliding_attention, but sliding_window is missing")
        return self

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None where it sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None
