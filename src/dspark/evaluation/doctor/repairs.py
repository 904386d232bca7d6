"""Which single change of the training forward makes its drafts agree with the target, and which with the engine.

Shapes: N anchors, G draft slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.evaluation.doctor import variants
from dspark.evaluation.doctor.laws import Observation, Score, score
from dspark.evaluation.doctor.pair import Pair
from dspark.evaluation.doctor.report import Check, passed, skipped
from dspark.evaluation.doctor.variants import Variant, vary

RUN = 6  # neighbouring anchors share most of their block: they count as one observation
FEW_ANCHORS = 12  # of each row, for a first look at many candidates
MANY = 6  # candidates of one kind that get that first look
MIN_GAIN, MIN_T = 0.01, 3.5  # of the overlap: what no change of a healthy drafter reaches
MIN_SHARE = 0.5  # of the overlap's gain that the agreement must gain: overlap alone may only tell that laws are blunter
EXHAUSTIVE_VOCABULARY = 16
RARE_EMBEDDINGS = 8


class Gain(NamedTuple):
    """A change's effect on the slots that both sides have."""

    agreement: tuple[float, float]  # as configured, with the change
    overlap: tuple[float, float]
    t: float  # of the overlap's mean difference, over runs of anchors

    @property
    def size(self) -> float:
        """Gain of the overlap."""
        return self.overlap[1] - self.overlap[0]

    @property
    def is_real(self) -> bool:
        """Whether drafts are better with the change, beyond chance and by both measures."""
        agreement = self.agreement[1] - self.agreement[0]
        return self.size >= MIN_GAIN and self.t >= MIN_T and agreement >= MIN_SHARE * self.size


class Tried(NamedTuple):
    """A change and what it gains."""

    variant: Variant
    gain: Gain


@dataclass(frozen=True)
class Family:
    """Changes of one kind, or why there are none."""

    name: str
    variants: list[Variant]
    reason: str = ""


def families(pair: Pair) -> list[Family]:
    """All changes to try on this drafter, by kind, in the order of the path through it."""
    drafter, config = pair.trained, pair.trained.config
    chain = config.algorithm == "eagle3"
    no_block, no_head = "EAGLE-3 drafts a chain, not a block", "the drafter has no sequential head"
    return [
        Family("layer ids", variants.layer_variants(config)),
        Family("rotation", variants.rope_variants(config, pair.target.config)),
        Family("slot convention", [] if chain else variants.slot_variants(config), no_block),
        Family("mask id", [] if chain else variants.mask_variants(config, mask_candidates(pair)), no_block),
        Family("block attention", [] if chain else variants.attention_variants(config), no_block),
        Family("positions", variants.position_variants()),
        Family("norms", variants.norm_variants(drafter)),
        Family("sequential head", variants.head_variants(drafter), no_head),
    ]


def mask_candidates(pair: Pair) -> list[int]:
    """Ids that a mask may have: all of a small vocabulary, else special tokens, neighbours, and what is hardly trained.

    The rows that training never touched are the shortest, or the nearest to the mean, of an embedding table.
    """
    size, mask = pair.target.config.vocab_size, pair.trained.config.mask_token_id
    assert mask is not None
    if size <= EXHAUSTIVE_VOCABULARY:
        return list(range(size))
    added = {index for index in pair.target.tokenizer.added_tokens_decoder if index < size}
    table = pair.trained.embedding_weight.float()
    rare = [table.norm(dim=1), (table - table.mean(0)).norm(dim=1)]
    unused = {int(i) for lengths in rare for i in lengths.topk(RARE_EMBEDDINGS, largest=False).indices}
    near = {i for i in (0, mask - 1, mask + 1, size - 1) if 0 <= i < size}
    return sorted(added | unused | near)


def try_family(
    pair: Pair, observation: Observation, anchors: Sequence[Tensor], base: Score, family: Family
) -> Tried | None:
    """The change of a family that gains the most; None in an empty one."""
    candidates = family.variants
    if len(candidates) > MANY:
        few = [places[:: max(1, len(places) // FEW_ANCHORS)] for places in anchors]
        ranked = [(float(_score(pair, observation, few, v).overlap.nanmean()), v) for v in candidates]
        candidates = [v for _, v in sorted(ranked, key=lambda item: -item[0])[:2]]
    tried = [Tried(v, compare(base, _score(pair, observation, anchors, v))) for v in candidates]
    return max(tried, key=lambda t: t.gain.size, default=None)


def _score(pair: Pair, observation: Observation, anchors: Sequence[Tensor], variant: Variant) -> Score:
    match variant.target:
        case "as it is":
            return score(vary(pair.trained, pair.target.decoder, variant), observation, anchors)
        case "without its final norm":
            return score(pair.trained, observation.without_norm(), anchors)
        case "with the drafter's rope":
            return score(pair.trained, observation.with_rope(pair.trained.config.rope), anchors)


def compare(base: Score, changed: Score) -> Gain:
    """The effect of a change, paired by anchor, over the slots that both sides have."""
    width = min(base.agreement.shape[1], changed.agreement.shape[1])
    agreement = [float(s.agreement[:, :width].nanmean()) for s in (base, changed)]
    overlap = [float(s.overlap[:, :width].nanmean()) for s in (base, changed)]
    difference = (changed.overlap[:, :width] - base.overlap[:, :width]).nanmean(1)  # [N]
    runs = torch.stack([run.mean() for run in torch.split(difference, RUN)])
    spread = float(runs.std()) / math.sqrt(len(runs)) if len(runs) > 1 else math.inf
    t = float(runs.mean()) / max(spread, 1e-12)
    return Gain((agreement[0], agreement[1]), (overlap[0], overlap[1]), t)


def judge_families(tried: Sequence[tuple[Family, Tried | None]]) -> list[Check]:
    """One check a family. Of the changes that really gain, the one that gains the most names the fault."""
    real = [t for _, t in tried if t is not None and t.gain.is_real]
    best = max(real, key=lambda t: t.gain.size, default=None)
    return [_judge(family, found, best) for family, found in tried]


def _judge(family: Family, found: Tried | None, best: Tried | None) -> Check:
    if found is None:
        return skipped(family.name, family.reason or "there is no other to try")
    (variant, gain), figures = found, _figures(found)
    before, after = gain.agreement
    with_change = f"acceptance {before:.2f} as configured, {after:.2f} with {variant.name}"
    if found is best:
        finding = f"with {variant.name} acceptance rises from {before:.2f} to {after:.2f}"
        return Check(family.name, "failed", finding, figures, variant.fault, variant.remedy)
    if gain.is_real and best is not None:
        return passed(family.name, f"{with_change}, which gains less than {best.variant.name}", figures)
    return passed(family.name, with_change, figures)


def _figures(found: Tried) -> dict[str, Any]:
    gain = found.gain
    return {
        "best_change": found.variant.name,
        "acceptance": [round(value, 4) for value in gain.agreement],
        "overlap": [round(value, 4) for value in gain.overlap],
        "t": round(gain.t, 2),
    }


def reproduce(pair: Pair, distance: Callable[[Drafter], float], candidates: Sequence[Variant]) -> tuple[Variant, float]:
    """The change of the drafter that comes nearest to another path, and how near: what `distance` measures."""
    changes = [variant for variant in candidates if variant.target == "as it is"]
    found = [(distance(vary(pair.trained, pair.target.decoder, variant)), variant) for variant in changes]
    nearest, variant = min(found, key=lambda item: item[0])
    return variant, nearest
