"""The prefix cache: what is found, who may take it, and that it changes no text."""

import dataclasses

import pytest
import torch

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, SamplingParams

from .test_failures import breaking_on

PROMPT = [(7 * i) % 250 + 1 for i in range(30)]
ENDLESS = SamplingParams(max_tokens=12, ignore_eos=True)
PLAIN = ENDLESS.replace(speculate=False)
SETTINGS = EngineSettings(max_batch=4, max_length=90, block_size=4)


def answer(engine: Engine, prompt: list[int], params: SamplingParams = ENDLESS) -> Completion:
    (completion,) = engine.generate([prompt], params)
    engine.check_integrity()
    return completion


@pytest.fixture(params=["block", "chain"])
def pair(request, target, make_drafter, make_chain):
    """The target, and a drafter of each kind; a chain's context reads the token after each row."""
    return target, (make_drafter if request.param == "block" else make_chain)(target.decoder)


def test_a_known_prefix_is_not_run_again_and_the_text_stays(pair):
    engine = Engine(*pair, SETTINGS)
    for prompt, found in ((PROMPT, 0), (PROMPT, 28), (PROMPT[:29], 28), (PROMPT[:28], 24), (PROMPT + [9, 8, 7], 28)):
        run = engine.stats.prompt_tokens
        done = answer(engine, prompt)
        assert done.token_ids == answer(Engine(pair[0]), prompt).token_ids
        assert done.figures.cached_tokens == found
        assert engine.stats.prompt_tokens - run == len(prompt) - found
    assert engine.stats.prefix_hit_rate == (28 + 28 + 24 + 28) / (30 + 30 + 29 + 28 + 33)


def test_the_drafters_context_comes_with_it(pair):
    """Keys and values of both caches after a hit are those of a prompt run whole."""

    def context(*prompts: list[int]) -> list[torch.Tensor]:
        engine = Engine(*pair, SETTINGS)
        for prompt in prompts[:-1]:
            answer(engine, prompt)
        engine.submit(prompts[-1], ENDLESS, "last")
        engine.step()
        request, runner = engine._requests["last"][0], engine._round.runner
        assert (request.figures.cached_tokens > 0) == (len(prompts) > 1)
        slots = [request.block_table[p // 4] * 4 + p % 4 for p in range(request.seq_len)]
        return [stored[slots] for cache in (runner.cache, runner.draft_cache) for stored in (*cache.k, *cache.v)]

    for hit, cold in zip(context(PROMPT[:20] + [3, 3], PROMPT), context(PROMPT), strict=True):
        torch.testing.assert_close(hit, cold, rtol=1e-4, atol=1e-5)


def test_the_answer_is_part_of_the_next_turns_prefix(pair):
    engine = Engine(*pair, SETTINGS)
    first = answer(engine, PROMPT)
    turn = PROMPT + first.token_ids + [5, 6, 7]
    second = answer(engine, turn)
    assert second.figures.cached_tokens == 40  # of the 41 tokens with keys and values
    assert second.token_ids == answer(Engine(pair[0]), turn).token_ids


def test_who_speculates_takes_blocks_with_its_drafters_context_alone(pair):
    engine = Engine(*pair, SETTINGS)
    answer(engine, PROMPT, PLAIN)
    assert answer(engine, PROMPT, PLAIN).figures.cached_tokens == 28
    assert answer(engine, PROMPT).figures.cached_tokens == 0
    assert answer(engine, PROMPT).figures.cached_tokens == 28
    other = Engine(*pair, SETTINGS)
    answer(other, PROMPT)
    assert answer(other, PROMPT, PLAIN).figures.cached_tokens == 28


def test_a_context_that_reads_the_next_token_is_shared_before_that_token_alone(pair):
    """The last row of a block differs where the next token does."""
    engine = Engine(*pair, SETTINGS)
    answer(engine, PROMPT)
    fork = PROMPT[:16] + [99, 98, 97]
    done = answer(engine, fork)
    assert done.figures.cached_tokens == (12 if pair[1].context_reads_next else 16)
    assert done.token_ids == answer(Engine(*pair, SETTINGS), fork).token_ids
    assert answer(engine, PROMPT[:16] + [90, 98], PLAIN).figures.cached_tokens == 16


def test_prompts_that_come_together_share_the_work(pair):
    """Whoever would find what another one is computing waits for it."""
    prompts = [PROMPT + [i] for i in range(1, 5)]
    engine = Engine(*pair, SETTINGS)
    done = engine.generate(prompts, ENDLESS)
    assert engine.stats.prompt_tokens == sum(map(len, prompts)) - 3 * 28
    assert [c.token_ids for c in done] == [answer(Engine(pair[0]), prompt).token_ids for prompt in prompts]


def test_the_oldest_prefix_goes_when_blocks_run_out(pair):
    engine = Engine(*pair, SETTINGS.replace(num_blocks=40))
    others = [[i] * 30 for i in range(100, 103)]
    answer(engine, PROMPT)
    for prompt in others:
        answer(engine, prompt)
        assert answer(engine, PROMPT).figures.cached_tokens == 28, "what is used again stays"
    assert answer(engine, others[0]).figures.cached_tokens == 0
    load = engine.load
    assert (load.free_blocks, load.num_blocks) == (39, 39)
    assert load.cached_blocks > 20


def test_a_failed_request_leaves_nothing_in_the_cache(make_model, make_drafter):
    broken = breaking_on(make_model("qwen3")[0], 250)
    drafter = make_drafter(broken.decoder, target_layer_ids=(0,))
    engine = Engine(broken, drafter, SETTINGS.replace(step_tokens=8))
    bad = PROMPT[:10] + [250] + PROMPT[10:]
    for _ in range(2):
        done = answer(engine, bad)
        assert (done.finish_reason, done.figures.cached_tokens) == ("error", 0)
    assert engine.load.cached_blocks == 0
    assert answer(engine, PROMPT).finish_reason == "length"


def test_the_cache_can_be_turned_off(pair):
    engine = Engine(*pair, SETTINGS.replace(prefix_cache=False))
    for _ in range(2):
        assert answer(engine, PROMPT).figures.cached_tokens == 0
    assert engine.load.cached_blocks == 0
    assert engine.stats.prefix_hit_rate == 0


def test_a_batch_of_one_still_reads_its_keys_as_a_view(pair, monkeypatch):
    engine = Engine(*pair, SETTINGS)
    views = []
    run = engine._round.runner.run

    def watched(token_ids, batch, taps):
        views.append(batch.contiguous is not None)
        return run(token_ids, batch, taps)

    monkeypatch.setattr(engine._round.runner, "run", watched)
    turn = PROMPT
    for _ in range(3):
        turn = turn + answer(engine, turn).token_ids + [5]
    assert views
    assert all(views)


def test_digests_tell_every_history_apart(target):
    """The same block of tokens after another one, or split differently, is another block."""
    engine = Engine(target, None, SETTINGS)
    answer(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for prompt in ([5, 6, 7, 8, 5, 6, 7, 8, 9], [0, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 9, 9]):
        done = answer(engine, prompt)
        assert done.figures.cached_tokens == (4 if prompt[0] == 1 else 0)
        assert done.token_ids == answer(Engine(target), prompt).token_ids
    assert dataclasses.asdict(engine.load)["running"] == 0
