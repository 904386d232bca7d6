"""Admission, preemption, abort: nothing is lost, every block comes back."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dspark.drafters.base import Drafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.errors import RequestError
from dspark.models.target import Target

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
    done, prefills = {}, 0
    while engine.has_work():
        before = engine.stats.prompt_tokens
        done |= {out.request_id: out.completion for out in engine.step() if out.finished}
        prefills += engine.stats.prompt_tokens > before
        engine.check_integrity()
    assert engine.stats.prompt_tokens > sum(map(len, PROMPTS)), "nobody was preempted"
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


def test_prompts_are_grouped_within_the_prefill_tokens(target):
    engine = Engine(target, None, EngineSettings(max_length=80, prefill_tokens=30))
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_tokens=2))
    groups = []
    while engine.has_work():
        groups.append([out.request_id for out in engine.step() if out.origins == ["prefill"]])
    assert [len(g) for g in groups if g] == [2, 1, 1, 2]


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


class Serving(RuleBasedStateMachine):
    """Any order of submit, step and abort in a pool that is too small for everybody."""

    def __init__(self, target: Target, drafter: Drafter, expected: list[list[int]]) -> None:
        super().__init__()
        self.engine = Engine(target, drafter, EngineSettings(max_batch=3, max_length=80, block_size=4, num_blocks=18))
        self.expected = expected  # the whole answer to each prompt
        self.live: dict[str, int] = {}

    @rule(which=st.integers(0, len(PROMPTS) - 1), max_tokens=st.integers(1, 30), speculate=st.booleans())
    def submit(self, which: int, max_tokens: int, speculate: bool) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculate=speculate)
        self.live[self.engine.submit(PROMPTS[which], params)] = which

    @precondition(lambda self: self.live)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.engine.has_work():
                outputs = self.engine.step()
                assert outputs or self.engine.stats.prompt_tokens, "a step without effect"
                for out in outputs:
                    if out.completion is not None:
                        self.check(out.completion, "length")
                self.engine.check_integrity()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.check(self.engine.abort(request_id), "abort")
        assert self.engine.abort(request_id) is None

    def check(self, completion, reason: str) -> None:
        answer = self.expected[self.live.pop(completion.request_id)]
        assert completion.finish_reason == reason
        assert completion.token_ids == answer[: len(completion.token_ids)]

    @invariant()
    def integrity(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.engine.has_work():
                break
            self.engine.step()
        assert not self.engine.has_work(), "the engine stands still"
        allocator = self.engine._scheduler.allocator
        assert allocator.num_free == allocator.num_blocks - 1


def test_any_order_of_events(target, drafter):
    done = Engine(target).generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    run_state_machine_as_test(
        lambda: Serving(target, drafter, [c.token_ids for c in done]),
        settings=settings(
            max_examples=12, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
