"""The supported families as data: how a Hugging Face `config.json` becomes a `DecoderConfig`, and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import DecoderConfig
from dspark.models.hf_fields import JsonDict, global_heads, layer_types, moe, moe_to_hf, rope_to_hf, ropes

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SAME_NAME = {*_SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"} | {
    "tie_word_embeddings",
}
_OUTER = ("architectures", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


@dataclass(frozen=True)
class Family:
    """What sets a family apart. A bias is fixed here or read from the config; defaults are Hugging Face's.

    `fixed` are fields of `DecoderConfig` that all its models share, `read` those that its config names alike, with the
    value for a config that does not. `refused` maps fields that would change the computation to what they may be.
    """

    model_type: str
    bias: Literal["none", "qkv", "config"] = "none"
    mlp_bias: bool = False  # whether the config may ask for one
    sliding: Literal["never", "all", "flag", "by_layer", "pattern"] = "never"
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    max_position_embeddings: int = 2048
    tied: bool = False
    act: tuple[str, str] = ("hidden_act", "silu")  # the field's name in the config, and its default
    wrappers: tuple[str, ...] = ()  # multi-modal classes whose text model this is, under `text_config`
    ropes: Mapping[str, JsonDict] | None = None  # by layer type, where the family turns sliding layers otherwise
    experts: bool = False
    global_head_dim: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_GEMMA = {"sandwich_norms": True, "scale_embeddings": True, "qk_norm": True}
_GEMMA3_ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
_NOTHING = (None, False, 0)


def _gemma4(model_type: str, wrapper: str, max_position_embeddings: int, refused: Mapping[str, Any]) -> Family:
    """Gemma 4 without what its smallest (per-layer embeddings, shared keys) and its sparse models add."""
    return Family(
        model_type,
        bias="config",
        sliding="pattern",
        head_dim=256,
        max_position_embeddings=max_position_embeddings,
        tied=True,
        act=("hidden_activation", "gelu_pytorch_tanh"),
        wrappers=(wrapper,),
        ropes=_GEMMA3_ROPES | {"full_attention": {"rope_theta": 1e6} | _PROPORTIONAL},
        global_head_dim=512,
        fixed=_GEMMA | {"v_norm": True, "layer_scalar": True, "query_pre_attn_scalar": 1},
        read={"final_logit_softcapping": None, "attention_k_eq_v": False},
        refused={
            "use_bidirectional_attention": (None, "vision"),
            "num_kv_shared_layers": _NOTHING,
            "use_double_wide_mlp": _NOTHING,
            **refused,
        },
    )


FAMILIES = {
    "LlamaForCausalLM": Family("llama", bias="config", mlp_bias=True),
    "MistralForCausalLM": Family("mistral", sliding="all", max_position_embeddings=131_072),
    "Qwen2ForCausalLM": Family("qwen2", bias="qkv", sliding="by_layer", max_position_embeddings=32_768),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        bias="config",
        sliding="by_layer",
        head_dim=128,
        max_position_embeddings=32_768,
        fixed={"qk_norm": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        bias="config",
        sliding="flag",
        max_position_embeddings=32_768,
        experts=True,
        fixed={"qk_norm": True},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        bias="config",
        sliding="pattern",
        head_dim=256,
        max_position_embeddings=131_072,
        tied=True,
        act=("hidden_activation", "gelu_pytorch_tanh"),
        wrappers=("Gemma3ForConditionalGeneration",),
        ropes=_GEMMA3_ROPES,
        fixed=_GEMMA | {"norm_style": "rms_plus_one"},
        read={"query_pre_attn_scalar": 256, "final_logit_softcapping": None},
        refused={"attn_logit_softcapping": (None,), "use_bidirectional_attention": _NOTHING},
    ),
    "Gemma4ForCausalLM": _gemma4(
        "gemma4_text",
        "Gemma4ForConditionalGeneration",
        131_072,
        {"hidden_size_per_layer_input": _NOTHING, "enable_moe_block": _NOTHING},
    ),
    "Gemma4UnifiedForCausalLM": _gemma4("gemma4_unified_text", "Gemma4UnifiedForConditionalGeneration", 262_144, {}),
}


def text_config(hf: JsonDict) -> dict[str, Any]:
    """Return a config as it is, or the text model's part of a multi-modal one with what stands beside it."""
    inner = hf.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(hf)
    return {**inner, **{name: hf[name] for name in _OUTER if hf.get(name) is not None}}


def config_from_hf(hf: JsonDict, where: str) -> DecoderConfig:
    """Read the decoder's config from a Hugging Face one; `where` names its file in errors.

    Raises `CheckpointError` for an unknown architecture (listing the supported ones), a missing or malformed field,
    and settings that change the computation in a way this decoder does not do.
    """
    hf = text_config(hf)
    architecture = _architecture(hf, where)
    family = FAMILIES[architecture]
    for name in _SIZES:
        if not isinstance(hf.get(name), int):
            raise CheckpointError(f"{where}: {name}: expected an integer, got {hf.get(name)!r}")
    if hf.get("quantization_config") is not None:
        raise CheckpointError(f"{where}: quantization_config: quantised weights are not supported; use the original")
    for name, allowed in family.refused.items():
        if hf.get(name) not in allowed:
            raise CheckpointError(f"{where}: {name}: {hf[name]!r} is not supported for {architecture}")
    heads = hf["num_attention_heads"]
    max_position = hf.get("max_position_embeddings") or family.max_position_embeddings
    config_bias = bool(hf.get("attention_bias", False))
    types, window = layer_types(hf, family.sliding)
    fields = {
        "architecture": architecture,
        **{name: hf[name] for name in _SIZES},
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or family.head_dim or hf["hidden_size"] // heads,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": max_position,
        "tie_word_embeddings": hf.get("tie_word_embeddings", family.tied),
        "attention_bias": family.bias == "qkv" or (family.bias == "config" and config_bias),
        "attention_output_bias": family.bias == "config" and config_bias,
        "mlp_bias": family.mlp_bias and bool(hf.get("mlp_bias", False)),
        "hidden_act": hf.get(family.act[0]) or family.act[1],
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
        "layer_types": types,
        "sliding_window": window,
        **ropes(hf, family.ropes, max_position, where),
        **family.fixed,
        **{name: hf.get(name, default) for name, default in family.read.items()},
    }
    if family.experts:
        fields["moe"] = moe(hf)
    if family.global_head_dim is not None:
        fields |= global_heads(hf, types, family.global_head_dim)
    try:
        return DecoderConfig.from_dict(fields, where)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the Hugging Face config that `config_from_hf` and transformers read back; `dtype` such as "bfloat16"."""
    family = FAMILIES[config.architecture]
    hf = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        **config.model_dump(include=_SAME_NAME),
        family.act[0]: config.hidden_act,
        "rope_parameters": rope_to_hf(config, family.ropes is not None),
        "eos_token_id": list(config.eos_token_ids) or None,
        "dtype": dtype,
        **{name: getattr(config, name) for name in family.read},
    }
    if family.bias == "config":
        hf["attention_bias"] = config.attention_bias
    if family.mlp_bias:
        hf["mlp_bias"] = config.mlp_bias
    if family.sliding != "never":
        hf["sliding_window"] = config.sliding_window
    if family.sliding in ("flag", "by_layer"):
        hf["use_sliding_window"] = config.sliding_window is not None
    if family.sliding in ("pattern", "by_layer"):
        hf["layer_types"] = list(config.layer_types)
    if family.global_head_dim is not None:
        hf["global_head_dim"] = config.global_head_dim
        hf["num_global_key_value_heads"] = config.num_global_key_value_heads
    if "hidden_size_per_layer_input" in family.refused:
        hf["hidden_size_per_layer_input"] = 0  # transformers takes 256 where it is missing
    if config.moe is not None:
        hf |= moe_to_hf(config.moe)
    return hf


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return an `eos_token_id` field, which may be one id, several or none, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _architecture(hf: JsonDict, where: str) -> str:
    names = hf.get("architectures") or [name for name, f in FAMILIES.items() if f.model_type == hf.get("model_type")]
    if len(names) == 1:
        for architecture, family in FAMILIES.items():
            if names[0] in (architecture, *family.wrappers):
                return architecture
    found = ", ".join(map(str, names)) or hf.get("model_type") or "none named"
    raise CheckpointError(
        f"{where}: unsupported architecture ({found}); supported: {', '.join(FAMILIES)} "
        "(for others a drafter can be trained, with states from transformers, but not served here)"
    )
