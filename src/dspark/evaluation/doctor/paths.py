"""The engine's draft path against the training forward: draft logits slot by slot, and what real rounds accept.

Shapes: N places, G draft slots, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.engine.request import Completion
from dspark.evaluation.doctor.laws import Observation, score
from dspark.evaluation.doctor.pair import Pair, dtype_name
from dspark.evaluation.doctor.repairs import Family, reproduce
from dspark.evaluation.doctor.report import Check, passed, skipped
from dspark.evaluation.doctor.serving import Place, serve_blocks, trained_laws
from dspark.evaluation.doctor.variants import Variant

LOGITS, ROUNDS = "draft logits", "rounds"
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # total variation that two orders of summation may bring
EXPLAINED = 0.25  # share of the distance that an explanation may leave
FLOOR = 1e-12  # probabilities below it are noise
MIN_LOST = 0.1  # share of the accepted drafts that real rounds may lack beside the training forward's


def check_logits(pair: Pair, observation: Observation, anchors: Sequence[Tensor], kinds: Sequence[Family]) -> Check:
    """Blocks that the engine drafts against the training forward of the same blocks."""
    rows = range(len(anchors))
    places = [Place(row, int(a)) for row in rows for a in anchors[row][:: max(1, len(anchors[row]) // 4)]]
    served = serve_blocks(pair, observation, places)

    def distances(drafter: Drafter) -> Tensor:
        laws, width = trained_laws(drafter, observation, served), served.laws.shape[1]
        known = min(width, laws.shape[1])
        distance = torch.ones(len(places), width)  # a slot that the other side lacks is wholly wrong
        distance[:, :known] = (laws[:, :known] - served.laws[:, :known]).abs().sum(-1) / 2
        return distance

    laws = trained_laws(pair.trained, observation, served)
    by_slot, dtype = distances(pair.trained).mean(0), pair.serving.dtype
    figures: dict[str, Any] = {
        "relative_error_by_slot": [float(e) for e in _relative_error(served.laws, laws[:, : served.laws.shape[1]])],
        "total_variation_by_slot": [float(d) for d in by_slot],
        "blocks": len(places),
        "dtype": dtype_name(dtype),
    }
    distance = float(by_slot.mean())
    if distance <= TOLERANCE[dtype]:
        text = f"{len(places)} blocks of the engine and of the training forward agree (total variation {distance:.1e})"
        return passed(LOGITS, text, figures)
    candidates = [variant for family in kinds for variant in family.variants]
    if dtype != torch.float32:
        name, remedy = f"weights in {dtype_name(dtype)}", "serve it in float32"
        candidates.append(Variant("dtype", name, remedy, dtype=dtype))
    variant, left = reproduce(pair, lambda drafter: float(distances(drafter).mean()), candidates)
    figures |= {"nearest": variant.name, "nearest_total_variation": left}
    if left > max(TOLERANCE[dtype], EXPLAINED * distance):
        finding = f"the engine's laws part from the training forward's (total variation {distance:.2f})"
        return Check(
            LOGITS, "failed", f"{finding}; no single change explains it", figures, "serving path",
            "compare inject and propose of this drafter with train_hidden",
        )  # fmt: skip
    finding = (
        f"the engine's laws part from the training forward's (total variation {distance:.2f}), but agree with it "
        f"({left:.1e}) where that has {variant.name}"
    )
    change = f"the serving path has {variant.name}: make it draft as the checkpoint says"
    return Check(LOGITS, "failed", finding, figures, variant.fault, variant.remedy if variant.dtype else change)


def check_rounds(pair: Pair, observation: Observation, completions: Sequence[Completion]) -> Check:
    """Drafts accepted in the engine's rounds against what the training forward would have had accepted there."""
    kept: list[tuple[Tensor, list[int]]] = []
    num_drafts = pair.settings.num_draft_tokens or pair.serving.num_drafts
    for completion, row in zip(completions, observation.rows, strict=True):
        whole = [
            r for r in completion.round_records
            if r.is_full_width and 1 < r.position < len(row.ids) - r.num_drafts and r.num_output == r.correct_len + 1
        ]  # fmt: skip
        kept.append((torch.tensor([r.position for r in whole], dtype=torch.int64), [r.correct_len for r in whole]))
    accepted = [count for _, counts in kept for count in counts]
    if not accepted:
        return skipped(ROUNDS, "the answers are too short for a whole round")
    some = observation._replace(rows=[row for row, (at, _) in zip(observation.rows, kept, strict=True) if len(at)])
    runs = score(pair.trained, some, [at for at, _ in kept if len(at)]).runs.clamp(max=num_drafts)
    engine, trained = sum(accepted), float(runs.sum())
    same = float((torch.tensor(accepted) == runs).float().mean())
    figures = {
        "rounds": len(accepted),
        "engine_accepted_length": 1 + engine / len(accepted),
        "training_accepted_length": 1 + trained / len(accepted),
        "rounds_with_the_same": same,
    }
    finding = (
        f"{len(accepted)} rounds accept {engine} drafts (τ {figures['engine_accepted_length']:.2f}), the training "
        f"forward's at the same anchors {trained:.0f}"
    )
    if engine < (1 - MIN_LOST) * trained - 2:
        change = "the first block of a context is right and later ones are not: see what rounds commit and inject"
        return Check(ROUNDS, "failed", finding, figures, "serving path", change)
    return passed(ROUNDS, finding, figures)


def _relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Of log-probabilities [N, G, Vd], by slot: the largest difference over the largest value, [G]."""
    ours, theirs = (law.clamp_min(FLOOR).log() for law in (ours, theirs))
    return (ours - theirs).abs().amax(dim=(0, 2)) / theirs.abs().amax(dim=(0, 2))
