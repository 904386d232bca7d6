"""The drafter's context of requests that nobody drafts for, brought up late: the same as if it had never waited."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import dspark.engine.round
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.planning import LONGEST_REST, Planner, _Rest
from dspark.engine.request import Request, SamplingParams

from .planning_parts import FixedCosts

PROMPTS = [[(7 * i * i + 13 * n) % 255 + 1 for i in range(n)] for n in (5, 12, 3, 20)]
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)
ROOMY = EngineSettings(max_batch=4, max_length=80, block_size=4)
FREE = [1.0] * 60  # every draft is verified


class Turns(Planner):
    """Drafts for the even and for the odd requests in turn, three rounds each."""

    def _choose(self, slots, max_lens):
        return (max_lens > 1) & (slots % 2 == self._round // 3 % 2)


class Never(Planner):
    """Drafts for nobody."""

    def _choose(self, slots, max_lens):
        return np.zeros(len(slots), dtype=bool)


def engine_with(pair, planner: type[Planner], settings: EngineSettings) -> Engine:
    engine, drafter = Engine(*pair, settings), pair[1]
    engine._round.planner = planner("lagged", drafter.num_drafts, settings.max_batch, FixedCosts(FREE), False)
    return engine


def context(engine: Engine, request: Request, length: int) -> list[torch.Tensor]:
    """What the drafter's cache holds of a request's first positions."""
    size = engine.settings.block_size
    slots = torch.tensor([request.block_table[at // size] * size + at % size for at in range(length)])
    return [part.index_select(0, slots) for layer in engine._round.runner.draft_cache.layers for part in layer]


def fresh_context(pair, token_ids: list[int], length: int) -> list[torch.Tensor]:
    """The same of a request whose prompt these tokens are."""
    engine = Engine(*pair, ROOMY)
    engine.submit(token_ids, SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    (request,) = engine._scheduler.running
    return context(engine, request, length)


@pytest.fixture(scope="module", params=["block", "chain"])
def pair(request, target, make_drafter, make_chain):
    return target, (make_chain if request.param == "chain" else make_drafter)(target.decoder)


@pytest.mark.parametrize(("rows", "most"), [("compact", 256), ("full", 256), ("compact", 2)])
def test_context_is_what_it_would_have_been(pair, rows, most, monkeypatch):
    monkeypatch.setattr(dspark.engine.round, "MOST_HELD", most)
    engine = engine_with(pair, Turns, ROOMY.replace(verify_rows=rows))
    for prompt in PROMPTS:
        engine.submit(prompt, PARAMS)
    longest = 0
    for _ in range(10):
        engine.step()
        engine.check_integrity()
        longest = max(longest, *(len(request.held) for request in engine._scheduler.running))
    assert longest == min(3, most - 1)
    for request in engine._scheduler.running:
        length = request.context_len
        assert length > len(request.prompt_ids) + 2
        expected = fresh_context(pair, request.ids(0, length + 1), length)
        for found, wanted in zip(context(engine, request, length), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_an_answer_that_nobody_drafted_for_is_a_prefix_with_context(pair):
    engine = engine_with(pair, Never, ROOMY)
    (first,) = engine.generate([PROMPTS[1]], PARAMS)
    assert first.drafted == 0
    text = first.prompt_ids + first.token_ids
    engine.submit([*text, 7, 9], PARAMS)
    engine.step()
    (request,) = engine._scheduler.running
    assert request.figures.cached_tokens > len(first.prompt_ids) + 20
    length = request.context_len
    expected = fresh_context(pair, request.ids(0, length + 1), length)
    for found, wanted in zip(context(engine, request, length), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_rows_held_back_go_with_their_blocks(pair):
    """Preemption and aborts in a pool too small: nothing is held of who has no blocks, and no text changes."""
    small = EngineSettings(max_batch=3, max_length=48, block_size=4, num_blocks=22, step_tokens=24)
    prompts = PROMPTS * 3
    plain = Engine(pair[0]).generate(prompts, PARAMS.replace(max_tokens=20))
    engine = engine_with(pair, Turns, small)
    names = [engine.submit(prompt, PARAMS.replace(max_tokens=20)) for prompt in prompts]
    done = {}
    for number in range(400):
        if number == 9:
            held = [request for request in engine._scheduler.running if request.held]
            assert held, "nothing is held back"
            engine.abort(held[0].request_id)
            assert not held[0].held
        done |= {out.request_id: out.completion for out in engine.step() if out.completion is not None}
        engine.check_integrity()
        if not engine.has_work():
            break
    assert engine.stats.preemptions > 0
    assert len(done) == len(prompts) - 1
    for name, expected in zip(names, plain, strict=True):
        if name in done:
            assert done[name].token_ids == expected.token_ids
    assert engine.load.free_blocks == engine.load.num_blocks


def test_rests_grow_and_end_with_the_batch():
    rest, looks = _Rest(), []
    for number in range(80):
        if not rest.goes_on(4):
            looks.append(number)
            rest.note(4, anybody=False)
    assert [b - a - 1 for a, b in pairwise(looks)][:7] == [0, 0, 1, 3, 7, 15, LONGEST_REST]
    assert not rest.goes_on(5)
    rest.note(5, anybody=True)
    assert not rest.goes_on(5)
    rest.note(5, anybody=False)
    rest.note(5, anybody=False)
    assert rest.goes_on(5)


def test_the_budget_of_a_step_follows_the_rows_that_rounds_run(pair):
    """Where nobody drafts, prompts get the rows that drafts would have taken."""
    settings = ROOMY.replace(step_tokens=16, max_length=90)
    widths = []
    for engine in (engine_with(pair, Never, settings), Engine(*pair, settings)):
        for prompt in PROMPTS[:3]:
            engine.submit(prompt, PARAMS)
        for _ in range(5):
            engine.step()
        before = engine.stats.prompt_tokens
        engine.submit([3] * 40, PARAMS)
        engine.step()
        widths.append(engine.stats.prompt_tokens - before)
    assert widths == [16 - 3, settings.block_size]
