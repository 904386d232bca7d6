"""The supported families as data: how a Hugging Face `config.json` becomes a `DecoderConfig`, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import DecoderConfig, RopeConfig

JsonDict = Mapping[str, Any]

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SAME_NAME = {*_SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"} | {
    "tie_word_embeddings",
    "hidden_act",
}


@dataclass(frozen=True)
class Family:
    """What sets a family apart. A bias is fixed here or read from the config; defaults are Hugging Face's."""

    model_type: str
    bias: Literal["none", "qkv", "config"] = "none"
    mlp_bias: bool = False  # whether the config may ask for one
    qk_norm: bool = False
    sliding: Literal["never", "all", "by_layer"] = "never"
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    max_position_embeddings: int = 2048


FAMILIES = {
    "LlamaForCausalLM": Family("llama", bias="config", mlp_bias=True),
    "MistralForCausalLM": Family("mistral", sliding="all", max_position_embeddings=131_072),
    "Qwen2ForCausalLM": Family("qwen2", bias="qkv", sliding="by_layer", max_position_embeddings=32_768),
    "Qwen3ForCausalLM": Family(
        "qwen3", bias="config", qk_norm=True, sliding="by_layer", head_dim=128, max_position_embeddings=32_768
    ),
}


def config_from_hf(hf: JsonDict, where: str) -> DecoderConfig:
    """Read the decoder's config from a Hugging Face one; `where` names its file in errors.

    Raises `CheckpointError` for an unknown architecture (listing the supported ones), a missing or malformed field,
    and settings that change the computation in a way this decoder does not do.
    """
    architecture = _architecture(hf, where)
    family = FAMILIES[architecture]
    for name in _SIZES:
        if not isinstance(hf.get(name), int):
            raise CheckpointError(f"{where}: {name}: expected an integer, got {hf.get(name)!r}")
    if hf.get("quantization_config") is not None:
        raise CheckpointError(f"{where}: quantization_config: quantised weights are not supported; use the original")
    heads = hf["num_attention_heads"]
    max_position = hf.get("max_position_embeddings") or family.max_position_embeddings
    config_bias = bool(hf.get("attention_bias", False))
    fields = {
        "architecture": architecture,
        **{name: hf[name] for name in _SIZES},
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or family.head_dim or hf["hidden_size"] // heads,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope": _rope(hf, max_position, where),
        "max_position_embeddings": max_position,
        "tie_word_embeddings": hf.get("tie_word_embeddings", False),
        "attention_bias": family.bias == "qkv" or (family.bias == "config" and config_bias),
        "attention_output_bias": family.bias == "config" and config_bias,
        "mlp_bias": family.mlp_bias and bool(hf.get("mlp_bias", False)),
        "qk_norm": family.qk_norm,
        "hidden_act": hf.get("hidden_act", "silu"),
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
        **_windows(hf, family),
    }
    try:
        return DecoderConfig.from_dict(fields, where)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the Hugging Face config that `config_from_hf` and transformers read back; `dtype` such as "bfloat16"."""
    family = FAMILIES[config.architecture]
    rope = config.rope.model_dump(exclude_none=True, exclude={"max_position_embeddings"})
    if config.rope.rope_type != "yarn":
        del rope["truncate"]
    hf = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        **config.model_dump(include=_SAME_NAME),
        "rope_parameters": rope,
        "eos_token_id": list(config.eos_token_ids) or None,
        "dtype": dtype,
    }
    if family.bias == "config":
        hf["attention_bias"] = config.attention_bias
    if family.mlp_bias:
        hf["mlp_bias"] = config.mlp_bias
    if family.sliding == "all":
        hf["sliding_window"] = config.sliding_window
    if family.sliding == "by_layer":
        hf |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
        hf["layer_types"] = list(config.layer_types)
    return hf


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return an `eos_token_id` field, which may be one id, several or none, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _architecture(hf: JsonDict, where: str) -> str:
    names = hf.get("architectures") or [name for name, f in FAMILIES.items() if f.model_type == hf.get("model_type")]
    if len(names) == 1 and names[0] in FAMILIES:
        return str(names[0])
    found = ", ".join(map(str, names)) or hf.get("model_type") or "none named"
    raise CheckpointError(f"{where}: unsupported architecture ({found}); supported: {', '.join(FAMILIES)}")


def _windows(hf: JsonDict, family: Family) -> dict[str, Any]:
    """Return sliding_window and layer_types: which layers see a window, by the family's rule or the config's list."""
    layers = hf["num_hidden_layers"]
    window, first = hf.get("sliding_window"), 0
    if family.sliding == "never" or (family.sliding == "by_layer" and not hf.get("use_sliding_window", False)):
        window = None
    if family.sliding == "by_layer":
        first = hf.get("max_window_layers", 28)
    types = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    if family.sliding == "by_layer" and hf.get("layer_types") is not None:
        types = hf["layer_types"]
    return {"sliding_window": window, "layer_types": types}


def _rope(hf: JsonDict, max_position: int, where: str) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope_type = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    partial = rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor: {partial} is not supported; only 1.0 is")
    fields = {"rope_theta": hf.get("rope_theta", 10_000.0), "rope_type": rope_type} | rope
    if rope_type == "dynamic":
        fields["max_position_embeddings"] = max_position
    if rope_type in ("llama3", "yarn") and "original_max_position_embeddings" not in fields:
        fields["original_max_position_embeddings"] = max_position
    if rope_type == "yarn" and fields.get("factor") is None:
        fields["factor"] = max_position / fields["original_max_position_embeddings"]
    try:
        return RopeConfig.from_dict({k: v for k, v in fields.items() if v is not None}, f"{where}: rope_parameters")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
