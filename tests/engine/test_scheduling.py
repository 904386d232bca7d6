"""Admission, preemption, abort: nothing is lost, every block comes back."""

import pytest

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.errors import RequestError

PROMPTS = [[(11 * i * n) % 250 + 1 for i in range(n)] for n in (3, 9, 14, 22, 6, 11)]


@pytest.fixture(scope="module")
def drafter(target, make_scripted):
    """Knows every second answer, so that rounds commit different lengths."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    done = Engine(target).generate(PROMPTS[::2], params)
    return make_scripted(target.decoder, {tuple(c.prompt_ids): c.token_ids for c in done})


def test_preemption_keeps_the_answers(target, drafter):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    ample = Engine(target, drafter, EngineSettings(max_length=80)).generate(PROMPTS, params)
    engine = Engine(target, drafter, EngineSettings(max_batch=6, max_length=80, block_size=4, num_blocks=24))
    for prompt in PROMPTS:
        engine.submit(prompt, params)
    done = {}
    while engine.has_work():
        done |= {out.request_id: out.completion for out in engine.step() if out.finished}
        engine.check_integrity()
    assert engine.stats.preemptions, "nobody was preempted"
    assert sum(c.figures.preemptions for c in done.values()) == engine.stats.preemptions
    assert [done[f"request-{i}"].token_ids for i in range(6)] == [c.token_ids for c in ample]
    assert [done[f"request-{i}"].origins[0] for i in range(6)] == ["prefill"] * 6


def test_plain_requests_share_a_batch_with_speculation(target, drafter):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    mixed = [params.replace(speculate=i % 3 > 0) for i in range(6)]
    engine = Engine(target, drafter, EngineSettings(max_length=80))
    done = engine.generate(PROMPTS, mixed)
    assert [c.token_ids for c in done] == [c.token_ids for c in Engine(target).generate(PROMPTS, params)]
    assert [c.rounds > 0 for c in done] == [p.speculate for p in mixed]
    assert Engine(target, drafter, EngineSettings(speculate=False)).generate(PROMPTS, params)[0].rounds == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1] * 80, "prompt has 80 tokens.*max_length"),
        ([1, 260], r"outside 0\.\.259"),
        ([-1], "outside"),
        ([1] * 40, "never fits the cache.*num_blocks"),
    ],
)
def test_what_can_not_be_served_is_refused(target, drafter, prompt, message):
    engine = Engine(target, drafter, EngineSettings(max_length=80, block_size=4, num_blocks=16))
    with pytest.raises(RequestError, match=message):
        engine.generate([[1, 2], prompt], SamplingParams(max_tokens=30))
    assert not engine.has_work()
    engine.check_integrity()


def test_ids_of_live_requests_are_unique(target):
    engine = Engine(target)
    engine.submit([1], SamplingParams(), "request-0")
    assert engine.submit([1], SamplingParams()) == "request-1"
    with pytest.raises(RequestError, match="in use"):
        engine.submit([1], SamplingParams(), "request-1")
    with pytest.raises(RequestError, match="3 prompts came with 1 params"):
        engine.generate([[1]] * 3, [SamplingParams()])
