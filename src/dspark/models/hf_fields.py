"""Parts of a Hugging Face `config.json` that several families share: rotations, layer types, experts."""

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import DecoderConfig, MoeConfig, RopeConfig

JsonDict = Mapping[str, Any]

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # Gemma: every sixth layer sees the whole context


def layer_types(hf: JsonDict, rule: str) -> tuple[list[str], int | None]:
    """Return each layer's type, and the window of the sliding ones: by the family's rule or the config's list."""
    layers = hf["num_hidden_layers"]
    window = hf.get("sliding_window")
    named = hf.get("layer_types")
    match rule:
        case "all":
            sliding = [window is not None] * layers
        case "flag":
            sliding = [window is not None and bool(hf.get("use_sliding_window", False))] * layers
        case "by_layer" if hf.get("use_sliding_window", False) and window is not None:
            sliding = [layer >= hf.get("max_window_layers", 28) for layer in range(layers)]
        case "pattern":
            period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or _PATTERN
            sliding = [(layer + 1) % period != 0 for layer in range(layers)]
        case _:
            sliding = [False] * layers
    types = [_SLIDING if slides else _FULL for slides in sliding]
    if rule in ("by_layer", "pattern") and named is not None:
        types = list(named)
    if rule in ("flag", "by_layer") and not hf.get("use_sliding_window", False):
        window = None
    return types, None if rule == "never" else window


def ropes(hf: JsonDict, by_type: Mapping[str, JsonDict] | None, max_position: int, where: str) -> dict[str, Any]:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before) as DecoderConfig's fields.

    `by_type` holds the defaults of a family that turns sliding layers otherwise than full ones.
    """
    given = dict(hf.get("rope_parameters") or {})
    if by_type is None:
        one = given or hf.get("rope_scaling") or {}
        base = {"rope_theta": hf.get("rope_theta", 10_000.0), "partial_rotary_factor": hf.get("partial_rotary_factor")}
        return {"rope": _rope({**base, **one}, max_position, where)}
    if _FULL not in given:
        full = {"rope_theta": hf.get("rope_theta"), **(hf.get("rope_scaling") or {})}
        given = {_FULL: full, _SLIDING: {"rope_theta": hf.get("rope_local_base_freq")}}
    kinds = {}
    for kind, default in by_type.items():
        own = {name: value for name, value in (given.get(kind) or {}).items() if value is not None}
        kinds[kind] = _rope({"rope_theta": default["rope_theta"], **own} if own else default, max_position, where)
    return {"rope": kinds[_FULL], "local_rope": kinds[_SLIDING]}


def rope_to_hf(config: DecoderConfig, by_type: bool) -> dict[str, Any]:
    """Return `rope_parameters` as transformers reads them."""
    if not by_type:
        return _rope_to_hf(config.rope)
    return {_FULL: _rope_to_hf(config.rope), _SLIDING: _rope_to_hf(config.local_rope or config.rope)}


def moe(hf: JsonDict) -> dict[str, Any]:
    """Read a sparse MLP: which layers have one, and how their experts are chosen."""
    step, dense = hf.get("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(hf["num_hidden_layers"]) if (layer + 1) % step}
    return {
        "num_experts": hf.get("num_experts", hf.get("num_local_experts")),
        "num_experts_per_tok": hf.get("num_experts_per_tok"),
        "moe_intermediate_size": hf.get("moe_intermediate_size"),
        "norm_topk_prob": hf.get("norm_topk_prob", False),
        "dense_layers": sorted(dense),
    }


def moe_to_hf(config: MoeConfig) -> dict[str, Any]:
    """Return the fields that `moe` and transformers read back."""
    return {
        **config.model_dump(exclude={"dense_layers"}),
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


def global_heads(hf: JsonDict, types: Sequence[str], default_head_dim: int) -> dict[str, Any]:
    """Read the head sizes of Gemma 4's full-attention layers: named by layer (transformers 5.24) or once (before)."""
    by_layer = hf.get("per_layer_config") or {}
    full = [by_layer.get(str(i)) or by_layer.get(i) for i, kind in enumerate(types) if kind == _FULL]
    own = next((layer for layer in full if layer), None)
    if own is not None:
        return {"global_head_dim": own.get("head_dim"), "num_global_key_value_heads": own.get("num_key_value_heads")}
    heads = hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None
    return {"global_head_dim": hf.get("global_head_dim") or default_head_dim, "num_global_key_value_heads": heads}


def _rope(given: JsonDict, max_position: int, where: str) -> RopeConfig:
    fields = {name: value for name, value in given.items() if value is not None and name != "type"}
    kind = fields.setdefault("rope_type", given.get("type") or "default")
    if kind != "proportional" and fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{where}: partial_rotary_factor: {given['partial_rotary_factor']} is not supported; only 1.0 is"
        )
    if kind == "proportional":
        fields.setdefault("partial_rotary_factor", 1.0)
    if kind == "dynamic":
        fields["max_position_embeddings"] = max_position
    if kind in ("llama3", "yarn"):
        fields.setdefault("original_max_position_embeddings", max_position)
    if kind == "yarn":
        fields.setdefault("factor", max_position / fields["original_max_position_embeddings"])
    try:
        return RopeConfig.from_dict(fields, f"{where}: rope_parameters")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    hf = rope.model_dump(exclude_none=True, exclude={"max_position_embeddings"})
    if rope.rope_type != "yarn":
        del hf["truncate"]
    return hf
