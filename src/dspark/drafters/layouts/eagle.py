"""The layout of the EAGLE-3 originals, read only: a Llama layer named `midlayer`, an LM head of its own, d2t and t2d.

Source: the public checkpoints of arXiv 2503.01840.
"""

from __future__ import annotations

from typing import Any

from dspark.drafters.config import DrafterConfig
from dspark.errors import CheckpointError, ConfigError
from dspark.models.families import config_from_hf

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER = ("layers.0.", "midlayer.")  # ours, theirs
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope", "max_position_embeddings",
    "attention_bias",
)  # fmt: skip


def is_original(raw: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 original."""
    return raw.get("architectures") == [ARCHITECTURE]


def parse_original(raw: dict[str, Any], where: str, num_target_layers: int) -> DrafterConfig:
    """config.json -> DrafterConfig for a target of so many layers. Raises CheckpointError naming the file and field.

    The file does not say which layers it reads: by convention the inputs of layers 2, n/2 and n - 3, which are the
    outputs of the layers before them. `target_layer_ids` in the file (outputs, from 0) overrides that.
    """
    tapped = raw.get("target_layer_ids")
    if tapped is None:
        if (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
            raise CheckpointError(
                f"{where}: eagle_config.eagle_aux_hidden_state_layer_ids: its readers disagree whether an id means a "
                "layer's input or its output; add target_layer_ids (outputs, counted from 0)"
            )
        tapped = [1, num_target_layers // 2 - 1, num_target_layers - 4]
    shape = config_from_hf(raw | {"architectures": ["LlamaForCausalLM"]}, where)
    fields: dict[str, Any] = {name: getattr(shape, name) for name in SHAPE_FIELDS}
    if raw.get("draft_vocab_size") not in (None, shape.vocab_size):
        fields["draft_vocab_size"] = raw["draft_vocab_size"]
    fields |= {name: raw[name] for name in ("ttt_length", "step_loss_decay") if name in raw}
    try:
        return DrafterConfig.from_dict(
            fields
            | {
                "algorithm": "eagle3",
                "qk_norm": False,
                "own_lm_head": True,
                "num_target_layers": num_target_layers,
                "target_layer_ids": tapped,
            },
            where,
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def original_name(name: str) -> str:
    """The name under which the originals keep a tensor of ours."""
    ours, theirs = LAYER
    return theirs + name.removeprefix(ours) if name.startswith(ours) else name
