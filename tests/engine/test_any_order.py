"""Any order of events in a pool too small for everybody: no block is lost, no text changes."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dspark.drafters.base import Drafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, SamplingParams
from dspark.errors import OverloadError
from dspark.models.target import Target

SHARED = [(7 * i) % 250 + 1 for i in range(24)]
PROMPTS = [*(SHARED[:n] + [n] for n in (4, 8, 9, 16, 23)), SHARED[:16] + [5, 6, 7], [9, 8, 7], [5] * 11]
ENDLESS = SamplingParams(max_tokens=30, ignore_eos=True)
KINDS = [
    ENDLESS,
    ENDLESS.replace(speculate=False),
    ENDLESS.replace(temperature=1.5, seed=3),
    ENDLESS.replace(temperature=1.5, seed=3, speculate=False, top_p=0.9),
]
SMALL = EngineSettings(max_batch=3, max_length=48, block_size=4, num_blocks=20, step_tokens=24, max_waiting=6)


class Serving(RuleBasedStateMachine):
    """Submit, step, abort, preempt and run into limits, in any order."""

    def __init__(self, target: Target, drafter: Drafter, alone: Callable[[int, int, int], Completion]) -> None:
        super().__init__()
        self.engine = Engine(target, drafter, SMALL.replace(aging_steps=5))
        self.alone = alone  # by prompt, kind and max_tokens: the whole answer of the request run alone
        self.live: dict[str, tuple[int, int, int]] = {}

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        kind=st.integers(0, len(KINDS) - 1),
        max_tokens=st.sampled_from([1, 2, 5, 12, 30]),
        priority=st.integers(-1, 2),
    )
    def submit(self, prompt: int, kind: int, max_tokens: int, priority: int) -> None:
        params = KINDS[kind].replace(max_tokens=max_tokens)
        load = self.engine.load
        if load.waiting >= SMALL.max_waiting + SMALL.max_batch - load.running:
            with pytest.raises(OverloadError, match="max_waiting"):
                self.engine.submit(PROMPTS[prompt], params, priority=priority)
        else:
            self.live[self.engine.submit(PROMPTS[prompt], params, priority=priority)] = prompt, kind, max_tokens

    @precondition(lambda self: self.live)
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.engine.has_work():
                before = self.engine.stats.prompt_tokens
                outputs = self.engine.step()
                assert outputs or self.engine.stats.prompt_tokens > before, "a step without effect"
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

    @precondition(lambda self: self.engine.load.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        scheduler = self.engine._scheduler
        scheduler.preempt(data.draw(st.sampled_from(scheduler.running)))

    def check(self, completion: Completion, reason: str) -> None:
        alone = self.alone(*self.live.pop(completion.request_id))
        assert completion.finish_reason == reason
        assert completion.token_ids == alone.token_ids[: len(completion.token_ids)]
        assert alone.text.startswith(completion.text)

    @invariant()
    def integrity(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.engine.has_work():
                break
            self.step(1)
        assert not self.engine.has_work(), "the engine stands still"
        load = self.engine.load
        assert (load.free_blocks, load.running, load.waiting) == (load.num_blocks, 0, 0)


@pytest.mark.parametrize("chain", [False, True], ids=["block", "chain"])
def test_any_order_of_events(target, make_scripted, chain):
    plain = Engine(target).generate(PROMPTS[::2], ENDLESS)
    drafter = make_scripted(target.decoder, {tuple(c.prompt_ids): c.token_ids for c in plain}, chain=chain)
    by_itself = Engine(target, drafter, SMALL.replace(max_batch=1, prefix_cache=False, max_waiting=None))

    @cache
    def alone(prompt: int, kind: int, max_tokens: int) -> Completion:
        # A sampled answer with a nearer end is not the start of a longer one: its last rounds judge fewer drafts.
        return by_itself.generate([PROMPTS[prompt]], KINDS[kind].replace(max_tokens=max_tokens))[0]

    run_state_machine_as_test(
        lambda: Serving(target, drafter, alone),
        settings=settings(
            max_examples=8,
            stateful_step_count=16,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate],  # shrinking would take minutes
        ),
    )
