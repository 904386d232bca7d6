"""transformers as the outside judge of the target: states layer by layer, and logits.

Shapes: S tokens, n layers (the embeddings counted), H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from dspark.errors import CheckpointError
from dspark.evaluation.doctor.pair import Pair
from dspark.evaluation.doctor.report import Check, passed, skipped
from dspark.models.hf import HuggingFaceCausalLM
from dspark.models.layers import softcap
from dspark.models.states import DecoderStates

STATES, NORM = "target states", "final norm"
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.08}  # relative error that two orders of summation may bring


class Judged(NamedTuple):
    """One text through our decoder and through transformers."""

    layers: tuple[int, ...]  # -1 (the embeddings), 0, 1, …
    ours: Tensor  # [S, n, H]
    theirs: Tensor  # [S, n, H]
    our_last: Tensor  # [S, H], before the final norm
    their_last: Tensor
    our_logits: Tensor  # f32 [S, V]
    their_logits: Tensor
    unnormed_logits: Tensor  # theirs, if the norm were left out


def judge_target(pair: Pair, ids: Sequence[int], wanted: bool) -> list[Check]:
    """Compare the target's states and logits over one text with transformers'; two checks."""
    if not wanted:
        return [skipped(name, "transformers was left out (--no-transformers)") for name in (STATES, NORM)]
    try:
        judged = _run(pair, ids)
    except CheckpointError as error:
        return [skipped(name, f"transformers gives no states: {error}") for name in (STATES, NORM)]
    tolerance = TOLERANCE[pair.target.decoder.dtype]
    return [check_states(judged, pair.trained.config.target_layer_ids, tolerance), check_norm(judged, tolerance)]


@torch.inference_mode()
def _run(pair: Pair, ids: Sequence[int]) -> Judged:
    decoder = pair.target.decoder
    layers = tuple(range(-1, decoder.config.num_hidden_layers))
    with _without_bars():
        judge = HuggingFaceCausalLM.load(pair.path, decoder.dtype, config=decoder.config)
    theirs, ours = judge([ids], layers)[0], DecoderStates(decoder)([ids], layers)[0]
    return Judged(
        layers,
        ours.taps,
        theirs.taps,
        ours.last_hidden,
        theirs.last_hidden,
        decoder.logits(ours.last_hidden).float(),
        judge.logits(theirs.last_hidden).float(),
        softcap(F.linear(theirs.last_hidden, judge.lm_head_weight), judge.final_logit_softcapping).float(),
    )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' own progress bars out of ours."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def check_states(judged: Judged, taps: Sequence[int], tolerance: float) -> Check:
    """The output of every layer; where a tapped one is not transformers', which layer's it is, or where it parts."""
    errors = relative_error(judged.ours, judged.theirs)  # [S, n]
    mean = errors.mean(0)
    tapped = [judged.layers.index(layer) for layer in taps]
    best = {layer: _best_match(judged, judged.layers.index(layer)) for layer in taps}
    figures: dict[str, Any] = {
        "error_by_tap": {layer: float(mean[i]) for layer, i in zip(taps, tapped, strict=True)},
        "best_match": best,
        "error_by_position": [float(part.mean()) for part in errors[1:, tapped].chunk(4)],
        "error_at_position_0": float(errors[0, tapped].max()),
        "tolerance": tolerance,
    }
    worst = float(mean.max())
    if worst <= tolerance:
        return passed(STATES, f"all {len(judged.layers)} states agree with transformers (error {worst:.1e})", figures)
    first = judged.layers[int((mean > tolerance).nonzero()[0])]
    moved = {layer: other for layer, other in best.items() if other not in (layer, None)}
    if moved:
        finding = "; ".join(f"the tap of layer {layer} holds the output of layer {at}" for layer, at in moved.items())
        change = "correct the layer count of the capture: ids count decoder layers from 0 and name their outputs"
        return Check(STATES, "failed", finding, figures, "wrong layer", change)
    if first >= 0 and float(errors[0].max()) <= tolerance:
        finding = f"states agree with transformers at position 0 and part behind it, from layer {first} on"
        change = "positions reach the target rotated otherwise: compare its rope settings with the published config"
        return Check(STATES, "failed", finding, figures, "scaled rope", change)
    finding = f"states part from transformers at layer {first} (error {float(mean.max()):.2f})"
    change = "the decoder does not compute this model: compare its config.json with the published one, and report it"
    return Check(STATES, "failed", finding, figures, "target states", change)


def check_norm(judged: Judged, tolerance: float) -> Check:
    """Logits: whether the final norm is applied before the LM head."""
    error = float(relative_error(judged.our_logits, judged.their_logits).mean())
    same = float((judged.our_logits.argmax(-1) == judged.their_logits.argmax(-1)).float().mean())
    unnormed = float(relative_error(judged.our_logits, judged.unnormed_logits).mean())
    last = float(relative_error(judged.our_last, judged.their_last).mean())
    figures = {"error": error, "argmax_agreement": same, "error_without_norm": unnormed, "error_before_norm": last}
    if error <= tolerance:
        return passed(NORM, f"applied: logits agree with transformers (error {error:.1e})", figures)
    if unnormed < error and unnormed <= max(tolerance, 2 * last):
        finding = f"skipped: logits are the LM head's of states before the norm (argmax agrees at {same:.0%})"
        change = "put the target's final norm before its LM head, in training labels and in serving"
        return Check(NORM, "failed", finding, figures, "norm skipped", change)
    if last > tolerance:
        return skipped(NORM, "the states before it part already")
    finding = f"logits part from transformers (error {error:.2f}) though the states before the final norm agree"
    change = "compare the target's final norm, LM head and soft cap with the published files"
    return Check(NORM, "failed", finding, figures, "target states", change)


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """|ours - theirs| / |theirs| over the last axis."""
    size: Tensor = torch.linalg.vector_norm(theirs.float(), dim=-1)
    error: Tensor = torch.linalg.vector_norm(ours.float() - theirs.float(), dim=-1)
    return error / size.clamp_min(1e-12)


def _best_match(judged: Judged, index: int) -> int | None:
    """Of transformers' layer at `index` and its neighbours, the one whose output ours is; None where it is none's."""
    near = range(max(0, index - 1), min(len(judged.layers), index + 2))
    errors = {i: float(relative_error(judged.ours[:, index], judged.theirs[:, i]).mean()) for i in near}
    best = min(errors, key=lambda i: errors[i])
    return judged.layers[best] if best == index or errors[best] < 0.1 * errors[index] else None
