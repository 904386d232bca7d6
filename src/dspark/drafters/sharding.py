"""A drafter shared by several processes: heads, MLP columns and the LM head's rows, as in `models.sharding`.

What is narrow stays whole everywhere: `fc`, norms, the sequential and the confidence head.
"""

from __future__ import annotations

from dspark.drafters.backbone import DraftAttention, DraftLayer
from dspark.drafters.base import Drafter
from dspark.models.sharding import Gathered, Shards, check_divides, own_columns, own_rows


def shard_drafter(drafter: Drafter, shards: Shards) -> None:
    """Keep this process's share of a drafter that is prepared and not packed, in place.

    Raises ConfigError naming the field that the number of processes does not divide; nothing has been changed then.
    """
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    check_divides("drafter", {name: drafter.config.model_dump()[name] for name in names}, shards)
    for layer in drafter.backbone.layers:
        assert isinstance(layer, DraftLayer)
        _shard_attention(layer.self_attn, shards)
        for name in ("gate_proj", "up_proj"):
            layer.mlp[name] = own_rows(layer.mlp[name], shards)
        layer.mlp["down_proj"] = own_columns(layer.mlp["down_proj"], shards, "mlp")
    drafter.replace_head(Gathered(drafter.lm_head_weight.to(drafter.dtype), shards, keep=False))
    drafter.shards = shards


def _shard_attention(attention: DraftAttention, shards: Shards) -> None:
    attention.q_proj = own_rows(attention.q_proj, shards)
    attention.k_proj = own_rows(attention.k_proj, shards)
    if attention.v_proj is not None:
        attention.v_proj = own_rows(attention.v_proj, shards)
    attention.num_heads //= shards.size
    attention.num_kv_heads //= shards.size
    attention.add_module("o_proj", own_columns(attention.o_proj, shards, "attention"))
