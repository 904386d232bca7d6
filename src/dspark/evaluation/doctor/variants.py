"""The ways in which two sides of one drafter part: each is one change, made to a copy that shares the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.factory import make_drafter
from dspark.evaluation.doctor.report import Fault
from dspark.models.config import DecoderConfig, RopeConfig
from dspark.models.decoder import Decoder
from dspark.models.rope import RotaryEmbedding, Rotation

LARGE = 1 << 26  # parameters: so many cost more to draw than the meta device does to start
THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)  # bases that public configs name, or leave out


@dataclass(frozen=True)
class Variant:
    """One change of the training forward. `remedy` mends the checkpoint where the change turns out to be right."""

    fault: Fault
    name: str
    remedy: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the drafter's config."""
    position_offset: int = 0
    """Added to the positions of the drafted rows."""
    skipped_norm: Literal["norm", "hidden_norm"] | None = None
    head: Literal["stored", "left out", "exchanged"] = "stored"
    target: Literal["as it is", "without its final norm", "with the drafter's rope"] = "as it is"
    """A change of what the drafter is held against, not of the drafter."""
    dtype: torch.dtype | None = None


class OffsetRotary(RotaryEmbedding):
    """Turns the rows of draft blocks, which training lays out as [B, A, Q], as if they stood `offset` further on."""

    def __init__(self, rope: RopeConfig, head_dim: int, offset: int) -> None:
        super().__init__(rope, head_dim)
        self.offset = offset

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return super().__call__(positions + self.offset if positions.ndim == 3 else positions, dtype)


class SkippedNorm(nn.Module):
    """A norm that does nothing; the weight stays, since it tells the dtype."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return x


def vary(drafter: Drafter, target: Decoder, variant: Variant) -> Drafter:
    """The drafter with one change. Its weights are those of `drafter`, not copies."""
    config = drafter.config.replace(**variant.changes)
    large = sum(p.numel() for p in drafter.parameters()) > LARGE
    with torch.device("meta") if large else nullcontext():  # the weights drawn here are all replaced
        changed = make_drafter(config, target, drafter.token_ids)
    changed.load_state_dict(drafter.state_dict(), assign=True)
    changed.requires_grad_(False)
    backbone: Any = changed.backbone
    backbone.feature_scale = drafter.backbone.feature_scale
    if variant.position_offset:
        backbone.rotary = OffsetRotary(config.rope, config.head_dim, variant.position_offset)
    if variant.skipped_norm is not None:
        setattr(backbone, variant.skipped_norm, SkippedNorm(getattr(backbone, variant.skipped_norm)))
    if variant.head == "left out":
        changed.markov_head = None
    elif variant.head == "exchanged":
        assert changed.markov_head is not None
        w1, w2 = changed.markov_head.markov_w1, changed.markov_head.markov_w2
        w1.weight, w2.weight = w2.weight, w1.weight
    return changed if variant.dtype is None else changed.to(variant.dtype)


def layer_variants(config: DrafterConfig) -> list[Variant]:
    """All ids one up or down, and each alone."""
    ids = config.target_layer_ids
    tried = [tuple(layer + step for layer in ids) for step in (-1, 1)]
    tried += [(*ids[:i], ids[i] + step, *ids[i + 1 :]) for i in range(len(ids)) for step in (-1, 1) if len(ids) > 1]
    legal = [other for other in tried if all(-1 <= layer < config.num_target_layers - 1 for layer in other)]
    return [
        Variant(
            "wrong layer",
            f"target_layer_ids {list(other)}",
            f"set target_layer_ids to {list(other)} (ids count decoder layers from 0 and name their outputs)",
            {"target_layer_ids": other},
        )
        for other in legal
    ]


def slot_variants(config: DrafterConfig) -> list[Variant]:
    """The other slot convention."""
    other = not config.sample_from_anchor
    if not other and config.block_size < 2:
        return []
    name, value = f"sample_from_anchor {str(other).lower()}", str(other).lower()
    return [Variant("wrong slot convention", name, f"set sample_from_anchor to {value}", {"sample_from_anchor": other})]


def attention_variants(config: DrafterConfig) -> list[Variant]:
    """The other mask inside the block."""
    other = "bidirectional" if config.block_attention == "causal" else "causal"
    name, remedy = f"block_attention {other}", f'set block_attention to "{other}"'
    return [Variant("causal mask", name, remedy, {"block_attention": other})]


def position_variants() -> list[Variant]:
    """Drafted rows one position earlier or later."""
    return [
        Variant(
            "shifted position",
            f"drafted rows {abs(offset)} position {'later' if offset > 0 else 'earlier'}",
            "the drafter was trained with its rows at other positions than anchor + 0, 1, …: train it again with "
            "dspark train, or correct the positions in the trainer that it comes from",
            position_offset=offset,
        )
        for offset in (-1, 1)
    ]


def head_variants(drafter: Drafter) -> list[Variant]:
    """No sequential head, and one whose two matrices are exchanged."""
    config = drafter.config
    if not config.markov_rank:
        return []
    found = [
        Variant(
            "swapped head",
            "no sequential head",
            "markov_head.* belong to another drafter (or vocabulary): restore them from this drafter's own checkpoint",
            head="left out",
        )
    ]
    if config.num_draft_logits == config.vocab_size:
        found.append(
            Variant(
                "swapped head",
                "markov_w1 and markov_w2 exchanged",
                "exchange markov_head.markov_w1.weight and markov_head.markov_w2.weight",
                head="exchanged",
            )
        )
    return found


def mask_variants(config: DrafterConfig, others: Iterable[int]) -> list[Variant]:
    """Other mask tokens."""
    return [
        Variant("wrong mask id", f"mask_token_id {i}", f"set mask_token_id to {i}", {"mask_token_id": i})
        for i in others
        if i != config.mask_token_id
    ]


def rope_variants(config: DrafterConfig, target: DecoderConfig) -> list[Variant]:
    """The target's rotation, the drafter's own without scaling, and other bases."""
    own = config.rope
    tried = [(target.rope, "the target's rope settings")]
    tried.append((RopeConfig(rope_theta=own.rope_theta), "rope without scaling"))
    tried += [(own.replace(rope_theta=theta), f"rope_theta {theta:g}") for theta in THETAS]
    found: dict[str, Variant] = {}
    for rope, name in tried:
        if rope != own and rope.digest() not in found:
            remedy = f"set the drafter's rope settings to {rope.model_dump(exclude_none=True)}"
            found[rope.digest()] = Variant("scaled rope", name, remedy, {"rope": rope})
    if target.rope == own:
        return list(found.values())
    remedy = f"restore the target's rope settings: {own.model_dump(exclude_none=True)}"
    other = Variant(
        "scaled rope", "the drafter's rope settings in the target", remedy, target="with the drafter's rope"
    )
    return [*found.values(), other]


def norm_variants(drafter: Drafter) -> list[Variant]:
    """A norm left out: the drafter's before the LM head, the one of the fused target states, the target's own."""
    names: list[Literal["norm", "hidden_norm"]] = ["norm"]
    if hasattr(drafter.backbone, "hidden_norm"):
        names.append("hidden_norm")
    found = [
        Variant(
            "norm skipped",
            f"{name} left out",
            f"the drafter was trained without its {name}: train it again with dspark train",
            skipped_norm=name,
        )
        for name in names
    ]
    remedy = "the drafter imitates lm_head(h) instead of lm_head(norm(h)): train it on labels after the final norm"
    return [*found, Variant("norm skipped", "a target without final norm", remedy, target="without its final norm")]
