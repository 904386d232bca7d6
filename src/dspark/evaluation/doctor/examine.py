"""`dspark doctor`: files first, then the target, then serving against training, then what would draft better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.engine.stats import LOW_ACCEPTED_LENGTH
from dspark.errors import RequestError
from dspark.evaluation.doctor.config import PROMPTS, DoctorOptions
from dspark.evaluation.doctor.judge import judge_target
from dspark.evaluation.doctor.laws import Observation, Score, anchors_of, observe, score
from dspark.evaluation.doctor.pair import Pair, open_pair
from dspark.evaluation.doctor.paths import check_logits, check_rounds
from dspark.evaluation.doctor.repairs import families, judge_families, try_family
from dspark.evaluation.doctor.report import Check, Diagnosis, passed, skipped
from dspark.evaluation.doctor.serving import answer
from dspark.evaluation.doctor.settings import check_digest, check_rope_settings
from dspark.evaluation.doctor.vocabulary import check_vocabulary, prompt_ids
from dspark.log import progress

MAX_ANCHORS = 64  # of each answer
MIN_ANSWER = 8  # tokens of an answer that is worth looking at
LOW_COVERAGE, OFTEN_WRITTEN = 0.5, 0.1


def examine(options: DoctorOptions) -> Diagnosis:
    """Open the pair and diagnose it. Raises a DsparkError when there is no pair to examine."""
    if options.model.threads:
        torch.set_num_threads(options.model.threads)
    pair, checks = open_pair(options.model)
    if pair is None:
        rest = skipped("vocabulary … acceptance", "nothing runs before the files are whole")
        return Diagnosis(options.model.target, options.model.drafter, [*checks, rest])
    return diagnose(pair, checks, options)


def diagnose(pair: Pair, checks: Sequence[Check], options: DoctorOptions) -> Diagnosis:
    """Every check behind the files', over the answers to the prompts. Raises RequestError where those are too short."""
    prompts, kinds, found = options.prompt or PROMPTS, families(pair), list(checks)
    with progress(8 + len(kinds), "doctor", "check", leave=False) as bar:

        def note(*new: Check) -> None:
            found.extend(new)
            bar.update(len(new))

        ids = [prompt_ids(pair.target.tokenizer, prompt) for prompt in prompts]
        note(check_vocabulary(pair, prompts), check_rope_settings(pair), check_digest(pair))
        completions = answer(pair, ids, options.answer_tokens)
        if any(completion.finish_reason == "error" for completion in completions):
            note(broken_target())
            return Diagnosis(options.model.target, str(pair.drafter_path), found)
        completions = [completion for completion in completions if len(completion.token_ids) >= MIN_ANSWER]
        if not completions:
            raise RequestError(f"prompt: no answer has {MIN_ANSWER} tokens: give prompts that are answered at length")
        texts = [([*c.prompt_ids, *c.token_ids], len(c.prompt_ids)) for c in completions]
        note(*judge_target(pair, texts[0][0], options.transformers))
        observation = observe(pair.target.decoder, texts, tapped_layers(pair))
        anchors = [anchors_of(row, MAX_ANCHORS) for row in observation.rows]
        note(check_logits(pair, observation, anchors, kinds), check_rounds(pair, observation, completions))
        base = score(pair.trained, observation, anchors)
        tried = []
        for kind in kinds:
            tried.append((kind, try_family(pair, observation, anchors, base, kind)))
            bar.update(1)
        found += judge_families(tried)
        note(check_acceptance(pair, observation, base))
    return Diagnosis(options.model.target, str(pair.drafter_path), found)


def broken_target() -> Check:
    """What is left to say of a target without finite logits."""
    finding = "the target has no finite logit somewhere in its answers; nothing behind it can be compared"
    change = "look for NaN in its files, and run it in float32 or bfloat16 if it was made for one of them"
    return Check("target states", "failed", finding, fault="target states", change=change)


def tapped_layers(pair: Pair) -> tuple[int, ...]:
    """The layers that the drafter reads and their neighbours, as far as they may be tapped."""
    last = pair.target.config.num_hidden_layers - 2
    near = {layer + step for layer in pair.trained.config.target_layer_ids for step in (-1, 0, 1)}
    return tuple(sorted(layer for layer in near if -1 <= layer <= last))


def check_acceptance(pair: Pair, observation: Observation, base: Score) -> Check:
    """Acceptance as configured: by slot, by length of the context, and whether it is worth drafting at all."""
    name, tau = "acceptance", 1 + float(base.runs.mean())
    figures: dict[str, Any] = {
        "acceptance": base.acceptance,
        "accepted_length": tau,
        "by_slot": by_slot(base.agreement),
        "by_context": by_context(base),
        "anchors": len(base.position),
        "mask_written": mask_written(pair, observation),
        "draft_vocabulary_coverage": coverage(pair, observation),
    }
    finding = f"{base.acceptance:.2f} of the drafts are the target's choice, accepted length τ {tau:.2f}"
    if (written := figures["mask_written"] or 0.0) > OFTEN_WRITTEN:
        finding += f"; the mask token is one that the target writes (probability up to {written:.2f})"
    if tau >= LOW_ACCEPTED_LENGTH:
        return passed(name, finding, figures)
    if figures["draft_vocabulary_coverage"] < LOW_COVERAGE:
        share = figures["draft_vocabulary_coverage"]
        finding += f"; its draft vocabulary holds {share:.0%} of the tokens that the target writes"
        change = "train it with a larger draft_vocab_size, or on text of this kind"
    else:
        change = "if no check before this one failed: train it longer, on the target's own answers to such prompts"
    return Check(name, "failed", finding, figures, "weak drafter", change)


def by_context(base: Score) -> list[dict[str, Any]]:
    """Acceptance by slot in ranges of context length, each range twice as long as the one before."""
    rows = []
    top = 1 << max(0, int(base.position.max())).bit_length()
    while top >= 8:
        inside = (base.position >= top // 2) & (base.position < top)
        if bool(inside.any()):
            slots = by_slot(base.agreement[inside])
            rows.append({"from": top // 2, "to": top - 1, "anchors": int(inside.sum()), "by_slot": slots})
        top //= 2
    return rows[::-1]


def by_slot(agreement: Tensor) -> list[float | None]:
    """Mean agreement of each slot; None where the answers end before it."""
    return [None if math.isnan(share) else round(share, 4) for share in agreement.nanmean(0).tolist()]


def mask_written(pair: Pair, observation: Observation) -> float | None:
    """The largest probability that the target gives to the mask token: a mask should be a token it never writes."""
    mask = pair.trained.config.mask_token_id
    return None if mask is None else max(float(row.law[:, mask].max()) for row in observation.rows)


def coverage(pair: Pair, observation: Observation) -> float:
    """Share of the answers' tokens that the draft vocabulary holds."""
    written: Tensor = torch.cat([row.ids[row.start :] for row in observation.rows])
    token_ids = pair.trained.token_ids
    return 1.0 if token_ids is None else float(torch.isin(written, token_ids).float().mean())
