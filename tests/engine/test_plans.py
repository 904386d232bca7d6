"""Plans in the engine: the text and the commits do not depend on how rows are run; idle drafters; recycled slots."""

import logging
import sys

import numpy as np
import pytest
import torch

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.expectation import Correction, Expectation
from dspark.engine.lagged import LaggedRing, Slots
from dspark.engine.planning import Planner, _Rest
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError, RequestError

from .conftest import drafter_for
from .planning_parts import FixedCosts, TellingDrafter, planned_engine

PROMPTS = [[(7 * i * i + 13 * n) % 255 + 1 for i in range(n)] for n in (1, 5, 12, 13, 20, 31, 3)]
ROOMY = {"max_batch": 4, "max_length": 80, "block_size": 4}
LINE = [1 + 0.05 * row for row in range(60)]
STEEP = [1 + 0.12 * row for row in range(60)]
CLIFFS = [1 + row // 6 for row in range(60)]
KINDS = ("early_stop", "lagged")
ROWS = ("compact", "full", "cap_accept")


@pytest.fixture(scope="module")
def telling(target):
    """A drafter whose confidence follows its drafts."""
    return target, drafter_for(target.decoder, TellingDrafter, enable_confidence_head=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_greedy_text_is_that_of_plain_decoding(kind, rows, target, telling, make_scripted, make_chain):
    params = SamplingParams(max_tokens=24)
    plain = Engine(target, None, EngineSettings(**ROOMY)).generate(PROMPTS, params)
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    scripted, chain = make_scripted(target.decoder, answers, wrong_every=3), make_chain(target.decoder)
    for drafter, costs in ((telling[1], LINE), (scripted, CLIFFS), (chain, LINE)):
        engine = planned_engine((target, drafter), FixedCosts(costs), planner=kind, verify_rows=rows, **ROOMY)
        done = engine.generate(PROMPTS, params)
        assert [(c.token_ids, c.text, c.finish_reason) for c in done] == [
            (c.token_ids, c.text, c.finish_reason) for c in plain
        ]
        engine.check_integrity()
    assert engine.stats.drafted, "nothing was verified"


@pytest.mark.parametrize("kind", KINDS)
def test_commits_do_not_depend_on_how_rows_are_run(kind, telling):
    """The same plan and the same randomness: packed rows, padded rows, and whole blocks with a cap on what counts."""
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    found = []
    for rows in ROWS:
        costs = FixedCosts(STEEP)
        engine = planned_engine(telling, costs, planner=kind, verify_rows=rows, record_rounds=True, **ROOMY)
        done = engine.generate(PROMPTS, params)
        found.append([(c.token_ids, c.origins, c.round_records) for c in done])
        num_rows = sum(rows for _, _, rows in costs.seen)
        whole = sum(requests + 4 * drafted for requests, drafted, _ in costs.seen)
        assert num_rows > 0.9 * whole if rows == "cap_accept" else num_rows < 0.8 * whole, (rows, num_rows, whole)
    assert found[0] == found[1] == found[2]
    lens = {record.verify_len for _, _, records in found[0] for record in records}
    assert lens >= {1, 2, 3}, "the plans hardly differ"


def test_seeded_answers_do_not_depend_on_the_batch_where_the_plan_does_not(telling):
    """With free rows every plan is the whole block, whatever the company."""
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    for kind in KINDS:
        together = planned_engine(telling, FixedCosts([1.0] * 9), planner=kind, **ROOMY).generate(PROMPTS, params)
        static = Engine(*telling, EngineSettings(**ROOMY)).generate(PROMPTS[::-1], params[::-1])[::-1]
        assert [c.token_ids for c in together] == [c.token_ids for c in static]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_does_not_pay_is_asked_now_and_then(kind, target, make_drafter):
    """Drafts that are hardly ever accepted: after some rounds the engine decodes plainly, and drafts very seldom."""
    pair = target, make_drafter(target.decoder)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    costs = FixedCosts(LINE, draft=0.05, plain=1.0)
    engine = planned_engine(pair, costs, planner=kind, max_batch=4, max_length=100)
    plain = Engine(target, None, EngineSettings(max_batch=4, max_length=100)).generate(PROMPTS[:4], params)
    assert [c.token_ids for c in engine.generate(PROMPTS[:4], params)] == [c.token_ids for c in plain]
    drafted = [count for _, count, _ in costs.seen]
    assert drafted[0] == 4, "before anything is known all are drafted for"
    assert sum(count > 0 for count in drafted[20:]) <= 1
    planner = engine._round.planner
    planner._credit = 10.0
    engine.generate(PROMPTS[:2], params)
    later = [count for _, count, _ in costs.seen[len(drafted) :]]
    assert 1 in later[:3], "what may be spent on a try is spent"
    assert sum(later) <= 3


def test_a_rest_outlasts_a_request_that_comes_or_goes():
    rest = _Rest()
    for _ in range(4):
        rest.note(32, anybody=False)
    assert rest.goes_on(30)
    assert not rest.goes_on(20)
    assert not _Rest().goes_on(32)


def test_a_batch_is_split_where_one_drafts_well_and_another_badly(target, make_scripted):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = Engine(target, None, EngineSettings(max_length=100)).generate(PROMPTS[:2], params)
    known = {tuple(c.prompt_ids): c.token_ids for c in plain[:1]}
    costs = FixedCosts(LINE, draft=0.15, plain=1.0)
    engine = planned_engine((target, make_scripted(target.decoder, known)), costs, planner="lagged", max_length=100)
    done = engine.generate(PROMPTS[:2], params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    both = [count for requests, count, _ in costs.seen if requests == 2]
    assert both[-1] == 1
    assert done[0].tau > 3


def test_without_a_table_nothing_is_trimmed_and_it_is_said_once(telling, caplog):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    static = Engine(*telling, EngineSettings(**ROOMY)).generate(PROMPTS, params)
    with caplog.at_level(logging.WARNING, "dspark"):
        engine = Engine(*telling, EngineSettings(planner="early_stop", **ROOMY))
        done = engine.generate(PROMPTS, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in static]
    assert [record.message for record in caplog.records if "cost table" in record.message] == [caplog.messages[0]]


def test_temperatures_must_cover_the_drafts(telling):
    with pytest.raises(ConfigError, match="confidence_temperatures has 2 values for 4 drafts"):
        Engine(*telling, EngineSettings(confidence_temperatures=(1.0, 1.2)))


def test_a_slot_that_changed_owner_reads_as_one():
    slots = Slots(2)
    ring = LaggedRing(slots, 3)
    a, b = object(), object()
    for value in (0.1, 0.2, 0.3):
        assert ring.read(slots.take([a, b])).tolist() == [[1.0] * 3] * 2 if value < 0.3 else True
        ring.write(slots.take([a, b]), np.full((2, 3), value))
    assert ring.read(slots.take([b, a]))[:, 0].tolist() == [0.2, 0.2], "two rounds before this one"
    slots.release(b)
    c = object()
    assert ring.read(slots.take([a, c]))[:, 0].tolist() == [0.2, 1.0]
    ring.write(slots.take([a, c]), np.full((2, 3), 0.4))
    d = object()  # nobody said that c is done
    assert ring.read(slots.take([d, a]))[:, 0].tolist() == [1.0, 0.3]
    ring.write(slots.take([a]), np.full((1, 3), 0.5))  # d sits this round out
    ring.write(slots.take([a, d]), np.full((2, 3), 0.6))
    assert ring.read(slots.take([a, d]))[:, 0].tolist() == [0.5, 1.0]


def test_expectation_leans_on_all_requests_until_one_has_shown_enough():
    slots = Slots(2)
    expectation = Expectation(slots, 2, of_survival=True)
    first = slots.take(["a"])
    assert expectation.survival(first).tolist() == [[1.0, 1.0]]
    for _ in range(100):
        expectation.learn(first, np.array([[0.5, 0.25]]))
    assert expectation.survival(first)[0].tolist() == pytest.approx([0.5, 0.25])
    second = slots.take(["a", "b"])[1:]
    assert expectation.survival(second)[0].tolist() == pytest.approx([0.5, 0.25]), "a newcomer is like the others"
    for _ in range(8):
        expectation.learn(second, np.array([[0.0, 0.0]]))
    assert expectation.survival(second)[0][0] < 0.15
    assert expectation.survival(first)[0][0] > 0.4
    for _ in range(400):
        expectation.forget(second)
    assert expectation.survival(second)[0][0] > 0.3, "what was known of an idle request ages"


def test_outcomes_stand_in_for_a_confidence_head_where_drafts_were_judged():
    slots = Slots(1)
    expectation = Expectation(slots, 3, of_survival=False)
    slot = slots.take(["a"])
    for i in range(200):
        accepted, judged = np.array([[True, i % 2 == 0, False]]), np.array([[True, True, False]])
        expectation.learn(slot, accepted.astype(float), judged)
    assert expectation.survival(slot)[0].tolist() == pytest.approx([1.0, 0.5, 0.5], abs=0.1)


def test_a_head_that_says_too_much_is_corrected():
    correction = Correction(2)
    survival, greedy = np.array([[0.9, 0.8]] * 4), np.array([True, True, False, False])
    for i in range(2000):
        correct = np.array([i % 2, 2 * (i % 2), 2, 2])
        correction.learn(survival, greedy, np.array([2, 3, 3, 2]), correct)
    corrected = correction.apply(survival, greedy)
    assert corrected[0].tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert corrected[2].tolist() == pytest.approx([1.0, 1.0], abs=1e-2)


def test_a_larger_batch_takes_no_more_operations():
    """No Python loop over requests or drafts in the plan of a round."""
    planner = Planner("lagged", 7, 32, FixedCosts(LINE), has_confidence=True)
    requests, longest, greedy = [object() for _ in range(32)], np.full(32, 8), np.zeros(32, dtype=bool)
    calls: list[str] = []
    counts = []
    for size in (4, 32):
        begun = planner.begin(requests[:size], longest[:size], greedy[:size])
        logits = torch.zeros(begun.num_drafting, 7)
        calls.clear()
        sys.setprofile(lambda frame, event, arg: calls.append(event) if event == "call" else None)
        planned = planner.plan(begun, logits)
        sys.setprofile(None)
        counts.append(len(calls))
        planner.end(planned, np.ones(begun.num_drafting, dtype=np.int64), int(planned.verify_lens.sum()))
    assert counts[1] <= counts[0] + 5


@pytest.mark.parametrize("planner", ["static", *KINDS])
def test_a_threshold_ends_the_verified_drafts_at_the_first_that_is_not_sure(planner, telling):
    """Every other request asks for one; the rows of the rest are as the plan has them."""
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=i, draft_threshold=0.5 if i % 2 else None)
        for i in range(len(PROMPTS))
    ]
    settings = {"planner": planner, "record_rounds": True, **ROOMY}
    done = planned_engine(telling, FixedCosts([1.0] * 60), **settings).generate(PROMPTS, params)
    cut = 0
    for answer in done[1::2]:
        for record in answer.round_records:
            sure = int((np.array(record.confidence_logits) >= 0).cumprod().sum())
            assert record.verify_len <= 1 + sure
            cut += 1 < record.verify_len == 1 + sure < 1 + record.num_drafts
    assert cut, "no block was cut"
    untouched = [record for answer in done[::2] for record in answer.round_records if record.num_drafts]
    assert any(record.is_full_width and min(record.confidence_logits) < 0 for record in untouched)


def test_greedy_text_does_not_depend_on_a_threshold(telling):
    plain = Engine(telling[0], None, EngineSettings(**ROOMY)).generate(PROMPTS, SamplingParams(max_tokens=24))
    engine = Engine(*telling, EngineSettings(**ROOMY))
    params = [SamplingParams(max_tokens=24, draft_threshold=0.8 if i % 2 else 0.5) for i in range(len(PROMPTS))]
    assert [c.token_ids for c in engine.generate(PROMPTS, params)] == [c.token_ids for c in plain]
    assert 0 < engine.stats.drafted < engine.stats.proposed


def test_a_threshold_follows_the_calibration(telling):
    """By temperatures the first draft's .7 becomes .54, and falls below .6."""
    drafted = []
    for temperatures in (None, (5.0, *[1.0] * (telling[1].num_drafts - 1))):
        engine = Engine(*telling, EngineSettings(confidence_temperatures=temperatures, **ROOMY))
        engine.generate(PROMPTS, SamplingParams(max_tokens=8, draft_threshold=0.6))
        drafted.append(engine.stats.drafted)
    assert drafted[0]
    assert not drafted[1]


def test_a_threshold_that_cannot_be_kept_is_refused(target, telling):
    params, without = SamplingParams(draft_threshold=0.5), drafter_for(target.decoder, markov_rank=0)
    for engine in (
        Engine(target, None, EngineSettings(**ROOMY)),
        Engine(target, without, EngineSettings(**ROOMY)),
        Engine(*telling, EngineSettings(verification="block", **ROOMY)),
    ):
        with pytest.raises(RequestError, match="draft_threshold"):
            engine.submit([1, 2], params)
