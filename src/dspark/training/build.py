"""A fresh drafter for a target: its config from the recipe, its vocabulary and scales from the training samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import BlockDrafter
from dspark.drafters.factory import make_drafter
from dspark.errors import ConfigError
from dspark.models.config import DecoderConfig
from dspark.models.ends import TargetEnds
from dspark.training.batch import SampleSource
from dspark.training.config import DrafterShape
from dspark.training.recency import look_at_newest

SCALE_SAMPLES = 64
INIT_STD = 0.02


def drafter_config(shape: DrafterShape, target: TargetEnds, target_layer_ids: tuple[int, ...]) -> DrafterConfig:
    """The drafter's config: the recipe's choices over the target's sizes. Raises ConfigError where they clash."""
    t = target.config
    fields = shape.model_dump(
        exclude={"intermediate_size", "num_attention_heads", "num_key_value_heads", "target_layer_ids"}
    )
    if shape.target_layer_ids and shape.target_layer_ids != target_layer_ids:
        raise ConfigError(
            f"drafter.target_layer_ids {list(shape.target_layer_ids)} are not the cache's {list(target_layer_ids)}: "
            "build the cache with the layers the drafter reads"
        )
    return DrafterConfig.from_dict(
        fields
        | {
            "vocab_size": t.vocab_size,
            "hidden_size": t.hidden_size,
            "intermediate_size": shape.intermediate_size or t.intermediate_size,
            "num_attention_heads": shape.num_attention_heads or t.num_attention_heads,
            **_heads(t, shape),
            "rms_norm_eps": t.rms_norm_eps,
            "final_logit_softcapping": t.final_logit_softcapping,
            "rope": t.rope,
            "max_position_embeddings": t.max_position_embeddings,
            "num_target_layers": t.num_hidden_layers,
            "target_layer_ids": target_layer_ids,
        },
        "drafter",
    )


def _heads(target: DecoderConfig, shape: DrafterShape) -> dict[str, Any]:
    """Head sizes as the target's; for Gemma 4 the layers of the public drafters, like its full-attention ones."""
    if target.global_head_dim is None:
        num_heads = shape.num_key_value_heads or target.num_key_value_heads
        return {"num_key_value_heads": num_heads, "head_dim": target.head_dim}
    return {
        "num_key_value_heads": shape.num_key_value_heads
        or target.num_global_key_value_heads
        or target.num_key_value_heads,
        "head_dim": target.global_head_dim,
        "layer_style": "gemma4",
        "attention_k_eq_v": target.attention_k_eq_v,
        "hidden_act": target.hidden_act,
    }


def spread_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Layers to tap, evenly from the second to the third last: what the public drafters read of a deep target."""
    last = num_layers - 3
    spread = (round(1 + i * (last - 1) / (count - 1)) for i in range(count))
    return tuple(sorted({max(0, min(layer, num_layers - 2)) for layer in spread}))


def new_drafter(
    config: DrafterConfig, target: TargetEnds, samples: SampleSource, seed: int, recent_heads: int = 0
) -> Drafter:
    """Random weights, scaled to the data: draft vocabulary by frequency, features by their measured spread.

    `recent_heads` of a block drafter begin by looking at the newest context row. Raises ConfigError where it has fewer.
    """
    token_ids = None
    if config.draft_vocab_size is not None:
        token_ids = frequent_tokens(samples, config.vocab_size, config.draft_vocab_size)
    drafter = make_drafter(config, target, token_ids)
    initialise(drafter, torch.Generator().manual_seed(seed))
    drafter.backbone.feature_scale.copy_(feature_scale(samples))
    if recent_heads:
        if not isinstance(drafter, BlockDrafter):
            raise ConfigError(f"recent_heads: algorithm {config.algorithm} has none: it is for block drafters")
        rows = samples.load(range(min(SCALE_SAMPLES, len(samples))))
        features, token_ids = torch.cat([row.features for row in rows]), torch.cat([row.token_ids for row in rows])
        look_at_newest(drafter, features.cpu(), token_ids.cpu(), recent_heads, seed)
    return drafter


def warm_start(read: Drafter, wanted: DrafterConfig, target: TargetEnds, seed: int) -> Drafter:
    """The drafter `read` as the recipe wants it: its weights and draft vocabulary, other draft lengths, new heads.

    Heads that the recipe names and `read` lacks (a DFlash drafter has none) start fresh; what no recipe can name
    (norms, head size, rotation) is as in `read`. Raises ConfigError where the recipe asks for other weights than there
    are.
    """
    ours, theirs = read.config.model_dump(), wanted.model_dump()
    fixed = DrafterShape.model_fields.keys() - _free_fields(read.config, wanted)
    clash = next((name for name in ours if name in fixed and ours[name] != theirs[name]), None)
    if clash is not None:
        raise ConfigError(
            f"init_from has {clash} {ours[clash]!r} but the recipe's drafter {theirs[clash]!r}: "
            f"set drafter.{clash} to the former, or train from random weights"
        )
    wanted = wanted.replace(**{name: ours[name] for name in ours.keys() - DrafterShape.model_fields.keys()})
    drafter = make_drafter(wanted, target, read.token_ids)
    initialise(drafter, torch.Generator().manual_seed(seed))
    drafter.load_state_dict(drafter.state_dict() | read.state_dict())
    drafter.backbone.feature_scale.copy_(read.backbone.feature_scale)
    return drafter


def _free_fields(read: DrafterConfig, wanted: DrafterConfig) -> set[str]:
    """What a recipe may set otherwise than the drafter that it starts from: nothing that the kept weights depend on."""
    free = {"block_size", "ttt_length", "step_loss_decay"}
    if "eagle3" in (read.algorithm, wanted.algorithm):
        # The conventions of a block mean nothing to a chain.
        free |= {"mask_token_id", "sample_from_anchor", "block_attention", "markov_head_type"}
        return free if read.own_lm_head else free | {"own_lm_head"}
    if not read.markov_rank:
        free |= {"algorithm", "markov_rank", "markov_head_type", "confidence_head_with_markov"}
    if not read.enable_confidence_head:
        free |= {"enable_confidence_head", "confidence_head_with_markov"}
    return free


def freeze(drafter: Drafter, beginnings: tuple[str, ...]) -> None:
    """Exclude parameters from training by the beginning of their names. Raises ConfigError when one names none."""
    for beginning in beginnings:
        chosen = [p for name, p in drafter.named_parameters() if name.startswith(beginning)]
        if not chosen:
            names = sorted({name.split(".")[0] for name, _ in drafter.named_parameters()})
            raise ConfigError(f"freeze: no parameter begins with {beginning!r}; the drafter has {', '.join(names)}")
        for parameter in chosen:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in drafter.parameters()):
        raise ConfigError("freeze: nothing is left to train")


def frequent_tokens(samples: SampleSource, vocab_size: int, keep: int) -> Tensor:
    """The `keep` most frequent supervised token ids, ascending; ties and gaps go to the lower id. [keep]"""
    counts = np.zeros(vocab_size)
    for i in range(len(samples)):
        row = samples.row(i)
        np.add.at(counts, row.token_ids.numpy()[row.loss_mask.numpy().astype(bool)], 1)
    ranked = np.argsort(-counts, kind="stable")[:keep]
    return torch.from_numpy(np.sort(ranked))


def feature_scale(samples: SampleSource) -> Tensor:
    """1 / root mean square of every tapped feature over the first samples: [m * H].

    Tapped layers differ in scale by orders of magnitude; without this the deepest one drowns the others.
    """
    total, rows = torch.zeros(()), 0
    for sample in samples.load(range(min(SCALE_SAMPLES, len(samples)))):
        flat = sample.features.float().flatten(1)
        total = total + flat.square().sum(dim=0).cpu()
        rows += len(flat)
    return (total / rows).sqrt().clamp(min=1e-3).reciprocal()


@torch.no_grad()
def adapt_scale(drafter: Drafter, samples: SampleSource) -> None:
    """Divide features by their spread and multiply `fc` by it: the same function, better conditioned for training."""
    scale = feature_scale(samples)
    drafter.backbone.fc.weight.mul_(drafter.backbone.feature_scale / scale)
    drafter.backbone.feature_scale.copy_(scale)


@torch.no_grad()
def initialise(drafter: Drafter, generator: torch.Generator) -> None:
    """Small random matrices; residual outputs shrunk with depth; the Markov embedding starts from the target's own."""
    config, backbone = drafter.config, drafter.backbone
    for name, p in drafter.named_parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=INIT_STD, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    nn.init.normal_(backbone.fc.weight, std=1 / math.sqrt(backbone.fc.in_features), generator=generator)
    depth = 1 / math.sqrt(2 * config.num_hidden_layers)
    for name, p in backbone.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            p.mul_(depth)
    if drafter.markov_head is not None:
        drafter.markov_head.markov_w1.weight.copy_(_principal(drafter.embedding_weight.float(), config.markov_rank))
        nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    if drafter.confidence_head is not None:
        nn.init.zeros_(drafter.confidence_head.proj.weight)
    if config.own_lm_head:
        drafter.lm_head_weight.copy_(drafter.target_lm_head_weight)


def _principal(embedding: Tensor, rank: int) -> Tensor:
    """Leading principal components of the embedding table [V, H] -> [V, r], unit spread: related tokens start alike."""
    centred = embedding - embedding.mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    kept = vectors[:, -rank:].flip(1)
    reduced = nn.functional.pad(centred @ kept, (0, max(0, rank - kept.shape[1])))
    return reduced / reduced.std().clamp(min=1e-6)
