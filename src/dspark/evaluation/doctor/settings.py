"""What the files of the two models say of each other: rope settings and digests."""

from __future__ import annotations

from typing import Any

from dspark.evaluation.doctor.pair import Pair
from dspark.evaluation.doctor.report import Check, passed, skipped
from dspark.models.config import RopeConfig


def check_rope_settings(pair: Pair) -> Check:
    """The rope settings of target and drafter, field by field.

    A drafter may well be trained with others than the target's; but where the target would have the digest that the
    drafter recorded if only its rope settings were the drafter's, they have been changed since.
    """
    name = "rope settings"
    target, drafter = pair.target.config.rope, pair.trained.config.rope
    different = rope_differences(target, drafter)
    figures: dict[str, Any] = {"target": _fields(target), "drafter": _fields(drafter)}
    if not different:
        return passed(name, f"the same in both: {_fields(target)}", figures)
    finding = "target and drafter differ in " + ", ".join(different)
    recorded = pair.provenance.get("target_digest")
    if recorded != pair.target.digest and recorded == pair.digest_with_drafters_rope:
        return Check(
            name,
            "failed",
            f"{finding}; with the drafter's the target is the one that the drafter was trained for",
            figures,
            "scaled rope",
            f"restore the rope settings in {pair.path / 'config.json'}: {_fields(drafter)}",
        )
    return passed(name, f"{finding}; see the check of the rotation for which are right", figures)


def check_digest(pair: Pair) -> Check:
    """Whether the target is the one that the drafter's files name."""
    name, recorded = "target digest", pair.provenance.get("target_digest")
    figures = {"digest": pair.target.digest, "recorded": recorded, "drafter_digest": pair.serving.digest}
    if recorded is None:
        return skipped(name, "the drafter's files do not say which weights they were trained for")
    if recorded == pair.target.digest:
        return passed(name, f"{recorded}, as when the drafter was trained", figures)
    wanted = pair.provenance.get("target", "another model")
    return Check(
        name,
        "failed",
        f"the drafter was trained for {wanted} ({recorded}), this target's config and weights are {pair.target.digest}",
        figures,
        "other target",
        f"pass --target {wanted} as it was then, or train a drafter for this target",
    )


def rope_differences(one: RopeConfig, other: RopeConfig) -> list[str]:
    """Fields in which two rotations differ, with both values."""
    ours, theirs = one.model_dump(), other.model_dump()
    names = sorted({name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)})
    return [f"{name} ({ours.get(name)}, {theirs.get(name)})" for name in names]


def _fields(rope: RopeConfig) -> dict[str, Any]:
    return rope.model_dump(exclude_none=True)
