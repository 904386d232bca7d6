"""Greedy answers: speculation, plain decoding and transformers agree token for token."""

import pytest
import torch

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams

from .conftest import FAMILIES

PROMPTS = [[(7 * i * i + 13 * n) % 255 + 1 for i in range(n)] for n in (1, 5, 12, 13, 20, 31)]
PARAMS = SamplingParams(max_tokens=24)


def transformers_answer(model, prompt: list[int], max_tokens: int, **options: object) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **options
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_three_agree(family, make_model, make_drafter, make_scripted):
    target, reference = make_model(family)
    expected = [transformers_answer(reference, prompt, PARAMS.max_tokens) for prompt in PROMPTS]
    settings = EngineSettings(max_batch=4, max_length=80, block_size=4)
    plain = Engine(target, None, settings).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in plain] == expected
    assert all(c.tau is None and set(c.origins) <= {"prefill", "bonus"} for c in plain)

    answers = dict(zip(map(tuple, PROMPTS), expected, strict=True))
    for drafter in (
        make_drafter(target.decoder),
        make_scripted(target.decoder, answers),
        make_scripted(target.decoder, answers, wrong_every=3),
    ):
        spec = Engine(target, drafter, settings).generate(PROMPTS, PARAMS)
        assert [c.token_ids for c in spec] == expected
        assert [c.text for c in spec] == [c.text for c in plain]
        assert [c.finish_reason for c in spec] == [c.finish_reason for c in plain]


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_from_anchor": False},
        {"block_attention": "causal", "markov_head_type": "gated"},
        {"markov_rank": 0, "algorithm": "dflash"},
        {"markov_head_type": "rnn", "enable_confidence_head": True, "confidence_head_with_markov": True},
    ],
)
def test_every_kind_of_drafter_keeps_the_text(changes, target, make_drafter):
    settings = EngineSettings(max_batch=3, max_length=80, num_draft_tokens=3)
    plain = Engine(target, None, settings).generate(PROMPTS, PARAMS)
    spec = Engine(target, make_drafter(target.decoder, **changes), settings).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in spec] == [c.token_ids for c in plain]
    assert all(len(c.accepted_by_position) <= 3 for c in spec)


def test_the_drafter_sees_the_same_context_in_prefill_and_in_rounds(target, make_scripted):
    """Context injected round by round equals the context of one prefill over prompt and answer."""
    prompt = PROMPTS[2]
    answer = Engine(target).generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids
    drafter = make_scripted(target.decoder, {tuple(prompt): answer}, wrong_every=4)

    def context(prompt_ids: list[int], max_tokens: int, num_positions: int):
        engine = Engine(target, drafter, EngineSettings(max_batch=1, max_length=80))
        engine.submit(prompt_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True), "r")
        while engine.has_work() and engine._requests["r"][0].seq_len < num_positions:
            engine.step()
        cache, start = engine._round.runner.draft_cache, engine._requests["r"][0].block_table[0] * 16
        return [stored[start : start + num_positions] for stored in (*cache.k, *cache.v)]

    whole = context(prompt + answer[:14], 40, len(prompt) + 14)
    rounds = context(prompt, 40, len(prompt) + 14)
    for a, b in zip(whole, rounds, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
