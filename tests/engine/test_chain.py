"""EAGLE-3 in the one round loop: the plain text, the target's context after every round, pages that come back."""

import pytest
import torch

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams

PROMPTS = [[(7 * i * i + 13 * n) % 255 + 1 for i in range(n)] for n in (1, 5, 12, 13, 20, 31)]
PARAMS = SamplingParams(max_tokens=24)
ENDLESS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_text_is_that_of_plain_decoding(family, make_model, make_chain, make_scripted):
    target, _ = make_model(family)
    settings = EngineSettings(max_batch=4, max_length=80, block_size=4)
    plain = Engine(target, None, settings).generate(PROMPTS, PARAMS)
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    for drafter in (
        make_chain(target.decoder),
        make_scripted(target.decoder, answers, chain=True),
        make_scripted(target.decoder, answers, wrong_every=3, chain=True),
    ):
        engine = Engine(target, drafter, settings)
        spec = engine.generate(PROMPTS, PARAMS)
        assert [(c.token_ids, c.text, c.finish_reason) for c in spec] == [
            (c.token_ids, c.text, c.finish_reason) for c in plain
        ]
        assert all(c.rounds for c in spec if len(c.token_ids) > 1)
    assert engine.stats.accepted_length > 1.5, "the script's runs must be accepted"


def test_pages_come_back_from_a_pool_that_runs_dry(target, make_scripted):
    """Preempted requests lose their pages and their chain's state, and still end with the plain text."""
    plain = Engine(target).generate(PROMPTS, ENDLESS)
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    drafter = make_scripted(target.decoder, answers, wrong_every=4, chain=True)
    engine = Engine(target, drafter, EngineSettings(max_batch=4, max_length=80, block_size=4, num_blocks=24))
    free = engine._scheduler.allocator.num_free
    index = [engine.submit(prompt, ENDLESS) for prompt in PROMPTS]
    engine.submit(PROMPTS[3], ENDLESS, "dropped")
    done = {}
    while engine.has_work():
        for out in engine.step():
            if out.completion is not None:
                done[out.request_id] = out.completion
        engine.check_integrity()
        engine.abort("dropped")
    assert engine.stats.preemptions
    assert [done[name].token_ids for name in index] == [c.token_ids for c in plain]
    assert engine._scheduler.allocator.num_free == free


def test_fewer_drafts_are_fewer_steps(target, make_chain):
    drafter = make_chain(target.decoder)
    steps, step = [], drafter.backbone.step
    drafter.backbone.step = lambda *args: (steps.append(1), step(*args))[1]
    engine = Engine(target, drafter, EngineSettings(num_draft_tokens=2))
    (done,) = engine.generate([PROMPTS[2]], ENDLESS)
    assert len(steps) == 2 * (done.rounds - 1), "the last token, alone, needs no drafts"
    assert len(done.accepted_by_position) == 2


def test_the_context_is_the_targets_after_every_round(target, make_scripted):
    """Keys, values and the chain's state after rounds equal those of one prefill over prompt and answer."""
    prompt = PROMPTS[2]
    answer = Engine(target).generate([prompt], ENDLESS)[0].token_ids
    drafter = make_scripted(target.decoder, {tuple(prompt): answer}, wrong_every=4, chain=True)

    def context(prompt_ids: list[int], num_positions: int) -> tuple[int, list[torch.Tensor]]:
        engine = Engine(target, drafter, EngineSettings(max_batch=1, max_length=80))
        engine.submit(prompt_ids, SamplingParams(max_tokens=40, ignore_eos=True), "r")
        while engine._requests["r"][0].seq_len < num_positions:
            engine.step()
        request, cache = engine._requests["r"][0], engine._round.runner.draft_cache
        start, length = request.block_table[0] * 16, request.seq_len
        seen = slice(start, start + length)
        return length, [cache.k[0][seen], cache.v[0][seen], cache.state(torch.tensor([start + length - 1]))]

    length, rounds = context(prompt, len(prompt) + 14)
    whole_length, whole = context(prompt + answer[: length - len(prompt)], length)
    assert length == whole_length
    for ours, theirs in zip(rounds, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
