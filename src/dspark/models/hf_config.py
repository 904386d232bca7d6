"""What a drafter takes over of a transformers config, for models that our decoder does not know."""

from typing import Any

from transformers import PretrainedConfig

from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import DecoderConfig
from dspark.models.families import token_ids

_NO_LIMIT = 131_072  # positions, where a config names none: such models have no table of them


def describe(config: PretrainedConfig, vocab_size: int, name: str) -> DecoderConfig:
    """Return the sizes of a causal LM as far as drafters and caches need them; no `Decoder` can be made of it.

    Of its rotation the base alone is kept: a drafter turns whole heads whatever its target does. Raises
    `CheckpointError` naming the model for sizes that a drafter cannot have.
    """
    text: Any = config.get_text_config()

    def first(*names: str, default: Any = None) -> Any:
        return next((v for n in names if (v := getattr(text, n, None)) is not None), default)

    hidden, heads, layers = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
    rope = first("rope_parameters", default={})
    rope = rope.get("full_attention", rope)
    fields = {
        "architecture": (config.architectures or [type(config).__name__])[0],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": first("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": first("num_key_value_heads", default=heads),
        "head_dim": first("head_dim", default=hidden // heads),
        "rms_norm_eps": first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", default=1e-6),
        "rope": {"rope_theta": rope.get("rope_theta", 10_000.0)},
        "max_position_embeddings": first("max_position_embeddings", "seq_length", "max_seq_len", default=_NO_LIMIT),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "layer_types": ("full_attention",) * layers,
        "final_logit_softcapping": first("final_logit_softcapping"),
        "eos_token_ids": token_ids(first("eos_token_id")),
    }
    try:
        return DecoderConfig.from_dict(fields, name)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def logit_scale(config: PretrainedConfig) -> float:
    """Return what a model multiplies its LM head's logits by (Cohere), or one over what it divides by (Granite)."""
    text: Any = config.get_text_config()
    divisor = getattr(text, "logits_scaling", None)
    return float(getattr(text, "logit_scale", None) or 1.0) / float(divisor or 1.0)
