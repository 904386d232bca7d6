"""Order of service: priorities, fairness, chunks of prompts beside rounds, a bounded queue."""

import pytest

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.engine.scheduler import MOST_PADDING
from dspark.errors import OverloadError

LONG = [(7 * i) % 250 + 1 for i in range(70)]
ENDLESS = SamplingParams(max_tokens=20, ignore_eos=True)
NARROW = EngineSettings(max_batch=4, max_length=96, block_size=4, step_tokens=16)


def finish(engine: Engine) -> list[str]:
    """Run to the end, and name the requests in the order in which they finished."""
    order = []
    while engine.has_work():
        order += [out.request_id for out in engine.step() if out.finished]
        engine.check_integrity()
    return order


@pytest.fixture
def steps(monkeypatch):
    """steps(engine) -> a list that grows by the (rows of the round, rows of each chunk) of every step."""

    def watch(engine: Engine) -> list[tuple[int, list[int]]]:
        seen, schedule = [], engine._scheduler.schedule

        def recorded():
            step = schedule()
            rows = sum(1 + engine._round.runner.num_drafts * r.speculates for r in step.decoding)
            seen.append((rows, [chunk.num_rows for chunk in step.chunks]))
            return step

        monkeypatch.setattr(engine._scheduler, "schedule", recorded)
        return seen

    return watch


def test_a_long_prompt_never_holds_up_who_runs(target, make_drafter, steps):
    alone = [Engine(target).generate([prompt], ENDLESS)[0].token_ids for prompt in (LONG[1:6], LONG)]
    engine = Engine(target, make_drafter(target.decoder), NARROW)
    seen = steps(engine)
    engine.submit(LONG[1:6], ENDLESS, "short")
    engine.step()
    engine.submit(LONG, ENDLESS, "long")
    answers = {"short": [], "long": []}
    while not answers["long"]:
        outputs = {out.request_id: out.token_ids for out in engine.step()}
        assert outputs["short"], "the running request puts out tokens in every step"
        for name, token_ids in outputs.items():
            answers[name] += token_ids
        engine.check_integrity()
    assert [chunks for _, chunks in seen[1:-1]] == [[11]] * (len(seen) - 2)
    assert len(seen) == 1 + 7
    while engine.has_work():
        for out in engine.step():
            answers[out.request_id] += out.token_ids
    assert answers["long"] == alone[1]
    assert alone[0][1:] == answers["short"]


def test_a_step_keeps_to_its_tokens_and_prompts_always_advance(target, make_drafter, steps):
    engine = Engine(target, make_drafter(target.decoder), NARROW.replace(max_batch=8))
    seen = steps(engine)
    for i in range(12):
        engine.submit(LONG[i : i + 5 + 4 * i], ENDLESS)
    finish(engine)
    assert any(len(chunks) > 1 for _, chunks in seen)
    assert any(rows > NARROW.step_tokens for rows, chunks in seen if chunks), "the rounds alone are over the budget"
    for rows, chunks in seen:
        room = max(NARROW.step_tokens - rows, NARROW.block_size)
        assert sum(chunks) <= room
        assert len(chunks) * max(chunks, default=0) <= MOST_PADDING * room, "scores are padded to the widest"


def test_lower_priorities_are_served_first_and_equals_as_they_came(target):
    engine = Engine(target, None, EngineSettings(max_batch=1))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5), ("f", 4)):
        engine.submit([1, 2, 3], params, name, priority)
    assert finish(engine) == ["d", "a", "c", "f", "b", "e"]


@pytest.mark.parametrize("aging_steps", [6, 10_000])
def test_nobody_is_overtaken_for_ever(target, aging_steps):
    """A level of priority is a head start of `aging_steps` steps: who comes later than that stays behind."""
    engine = Engine(target, None, EngineSettings(max_batch=1, aging_steps=aging_steps))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.submit([9, 9, 9], params, "patient", 2)
    order = []
    for came in range(1, 61):  # a newcomer in every step, more than can be served
        engine.submit([came], params, str(came), 0)
        order += [out.request_id for out in engine.step() if out.finished]
        if "patient" in order:
            break
    if aging_steps == 6:
        assert order == [*map(str, range(1, 13)), "patient"]  # "13" came when 2 * 6 steps were done
    else:
        assert "patient" not in order


def test_a_request_of_lower_priority_gives_up_its_place_and_keeps_its_answer(target, make_drafter):
    engine = Engine(target, make_drafter(target.decoder), NARROW.replace(max_batch=1))
    engine.submit(LONG[:30], ENDLESS, "low", 1)
    for _ in range(5):
        engine.step()
    engine.submit(LONG[30:60], ENDLESS, "high", 0)
    engine.submit(LONG[10:20], ENDLESS, "later", 1)
    done = {}
    while engine.has_work():
        done |= {out.request_id: out.completion for out in engine.step() if out.finished}
        engine.check_integrity()
        assert engine.load.running <= 1
    assert list(done) == ["high", "low", "later"]
    assert [done[name].figures.preemptions for name in done] == [0, 1, 0]
    for completion in done.values():
        assert completion.token_ids == Engine(target).generate([completion.prompt_ids], ENDLESS)[0].token_ids
    assert done["low"].figures.cached_tokens == 0, "tokens found again after a preemption are not the prompt's"
    assert engine.stats.cached_tokens > 0


def test_nobody_gives_up_a_place_in_vain(target):
    """Who stands behind goes on running while the blocks of all of them would not be enough."""
    settings = EngineSettings(max_batch=4, max_length=96, block_size=4, num_blocks=25, prefix_cache=False)
    engine = Engine(target, None, settings)
    engine.submit(LONG[:50], ENDLESS, "first", 0)
    engine.step()
    engine.submit(LONG[:10], ENDLESS, "behind", 2)
    engine.step()
    engine.submit(LONG[:60], ENDLESS, "big", 1)  # needs 16 of 24 blocks, and "first" holds 13
    engine.step()
    assert engine.stats.preemptions == 0
    assert engine.load.running == 2
    assert finish(engine)[0] == "first"


def test_so_many_may_wait_and_no_more(target):
    engine = Engine(target, None, EngineSettings(max_batch=1, max_waiting=2))
    for _ in range(3):  # for one of them there is a place
        engine.submit([1, 2], ENDLESS)
    with pytest.raises(OverloadError, match=r"2 requests wait for a place already \(max_waiting\)"):
        engine.submit([1, 2], ENDLESS)
    with pytest.raises(OverloadError):
        engine.generate([[5]], ENDLESS)
    engine.step()
    assert (engine.load.running, engine.load.waiting) == (1, 2)
    with pytest.raises(OverloadError):
        engine.submit([1, 2], ENDLESS)
    engine.abort("request-1")
    engine.submit([1, 2], ENDLESS, "last")
    assert len(finish(engine)) == 3
    none = Engine(target, None, EngineSettings(max_batch=1, max_waiting=0))
    none.submit([1, 2], ENDLESS)
    with pytest.raises(OverloadError):
        none.submit([1, 2], ENDLESS)


@pytest.mark.parametrize("state", ["waiting", "prompt under way", "running", "preempted"])
def test_abort_at_any_moment(target, make_drafter, state):
    engine = Engine(target, make_drafter(target.decoder), NARROW)
    if state == "waiting":
        for i in range(NARROW.max_batch):
            engine.submit([i + 1] * 30, ENDLESS)
    engine.submit(LONG, ENDLESS, "it")
    for _ in range({"waiting": 1, "prompt under way": 2}.get(state, 7)):
        engine.step()
    request = engine._requests["it"][0]
    if state == "preempted":
        engine._scheduler.preempt(request)
    assert (request in engine._scheduler.waiting) == (state in ("waiting", "preempted"))
    assert (0 < request.seq_len < len(LONG)) == (state == "prompt under way")
    done = engine.abort("it")
    assert done.finish_reason == "abort"
    assert bool(done.token_ids) == (state in ("running", "preempted"))
    assert done.figures.total_seconds > 0
    engine.check_integrity()
    finish(engine)
    assert engine.load.free_blocks == engine.load.num_blocks
