"""Recorded rounds write what eager rounds write, and keep to what may be recorded."""

from collections import Counter

import pytest
import torch

from dspark.drafters.base import Drafter
from dspark.engine import round as rounds
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.graphs import RecordedRunner, pack_static, row_size
from dspark.engine.pair import open_engine
from dspark.engine.recording import FxRecording, Recorder
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError
from dspark.models.target import Target
from dspark.spec.layout import pack

from .conftest import CHAIN, drafter_for, follow
from .planning_parts import FixedCosts, TellingDrafter, with_costs
from .recorded_parts import PROMPTS, SETTINGS, KnowingBlock, KnowingChain, params_of, serve, table_of, texts
from .test_failures import breaking_on

KINDS = {
    "dspark": {"markov_head_type": "rnn", "enable_confidence_head": True},
    "dflash": {"markov_rank": 0, "algorithm": "dflash", "sample_from_anchor": False},
    "eagle3": CHAIN,
}
SMALL = {"num_hidden_layers": 1, "target_layer_ids": (-1, 0)}
CHANGES = {
    "dspark": {"block_size": 4},  # more sizes of keys
    "dspark, full": {"verify_rows": "full"},
    "dflash": {},
    "eagle3": {"num_blocks": 12},  # too few: some requests are displaced
}


def runner_of(engine: Engine) -> RecordedRunner:
    runner = engine._round.runner
    assert isinstance(runner, RecordedRunner)
    return runner


@pytest.fixture(scope="module")
def target(make_model) -> Target:
    return make_model(num_hidden_layers=2)[0]


@pytest.fixture(scope="module")
def plain(target: Target) -> dict:
    return texts(serve(Engine(target, None, SETTINGS), PROMPTS, params_of(PROMPTS)))


def knowing(target: Target, plain: dict, kind: str, wrong_every: int = 3) -> Drafter:
    """A drafter of a kind that mostly drafts what the target will write."""
    cls = KnowingChain if kind == "eagle3" else KnowingBlock
    drafter = drafter_for(target.decoder, cls, **(KINDS[kind] | SMALL))
    answers = {tuple(PROMPTS[int(name.split(".")[0])]): tokens for name, (tokens, *_) in plain.items()}
    c, script = target.config, follow(answers, drafter.num_drafts, wrong_every)
    drafter.table = table_of(script, c.max_position_embeddings + 8, c.vocab_size, drafter.num_drafts)
    return drafter


def writes_as_expected(engine: Engine, plain: dict) -> bool:
    """Whether some answers are right and block 0 stays zero."""
    try:
        written = texts(serve(engine, PROMPTS[:4], params_of(PROMPTS[:4])))
    except AssertionError:
        return False
    return written == {name: plain[name] for name in written}


@pytest.mark.parametrize("case", CHANGES)
def test_greedy_text_and_context_are_those_of_eager_rounds(case, target, plain):
    settings = SETTINGS.replace(graphs="on", **CHANGES[case])
    drafter = knowing(target, plain, case.split(",")[0])
    engine = Engine(target, drafter, settings)
    done = serve(engine, PROMPTS, params_of(PROMPTS), Engine(target, drafter, settings.replace(graphs="off")))
    assert texts(done) == plain
    runner, stats = runner_of(engine), engine.stats
    assert stats.accepted > 20
    assert runner.num_judged == stats.steps, "all rounds are greedy, so all judge themselves"
    assert stats.steps < runner.recorder.num_replays <= 2 * stats.steps
    assert runner.recorder.num_recordings < 25
    assert (stats.preemptions > 0) == (case == "eagle3")
    assert stats.cached_tokens


@pytest.mark.parametrize("kind", ["early_stop", "lagged"])
def test_planned_rounds_write_the_same(kind, target, plain):
    """Costs by which some requests are drafted for and others not: these keep rows back, of recordings too."""
    drafter = drafter_for(target.decoder, TellingDrafter, enable_confidence_head=True, **SMALL)
    costs = [1 + 0.12 * row for row in range(60)]
    settings = SETTINGS.replace(graphs="on", planner=kind)
    params = [p.replace(speculate=i % 4 != 1) for i, p in enumerate(params_of(PROMPTS))]
    engine = with_costs(Engine(target, drafter, settings), FixedCosts(costs))
    beside = with_costs(Engine(target, drafter, settings.replace(graphs="off")), FixedCosts(costs))
    held: Counter[bool] = Counter()
    hold = rounds.hold
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "hold", lambda *args: held.update([args[0].is_packed]) or hold(*args))
        assert texts(serve(engine, PROMPTS, params, beside)) == plain
    assert engine.stats.accepted_by_position == beside.stats.accepted_by_position
    assert engine.stats.verify_lens == beside.stats.verify_lens, "the plans differ"
    assert held.total(), "no row was kept back"
    assert runner_of(engine).num_judged == engine.stats.steps


def test_rounds_that_somebody_looks_into_end_eagerly(target, plain):
    """Requests that sample, edit logits, follow a grammar or ask for log probabilities, beside greedy ones."""
    kinds = [
        {},
        {"temperature": 0.8, "seed": 7},
        {"logit_bias": {5: 3.0}},
        {"regex": "[ab]{2,4}-[0-9]{3}", "ignore_eos": False},
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 8, "top_p": 0.9, "speculate": False},
        {"repetition_penalty": 1.3, "n": 2},
        {"temperature": 0.7, "seed": 9, "top_k": 20, "min_tokens": 4},
    ]
    params = [SamplingParams(max_tokens=8, ignore_eos=True).replace(**kind) for kind in kinds]
    params += [SamplingParams(max_tokens=12, ignore_eos=True)] * 2
    drafter = knowing(target, plain, "dspark")
    engine = Engine(target, drafter, SETTINGS.replace(graphs="on"))
    beside = Engine(target, drafter, SETTINGS)
    done, expected = serve(engine, PROMPTS, params, beside), serve(Engine(target, drafter, SETTINGS), PROMPTS, params)
    assert texts(done) == texts(expected)
    for name, completion in expected.items():
        mine = done[name].logprobs
        assert (mine is None) == (completion.logprobs is None)
        for a, b in zip(mine or (), completion.logprobs or (), strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert 0 < runner_of(engine).num_judged < engine.stats.steps, "some rounds end on the device, some do not"


def test_a_sampled_round_that_judged_itself_would_be_seen(target, monkeypatch):
    """Planted: the rule that greedy rounds alone may is left out."""
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=i, ignore_eos=True) for i in range(2)]
    expected = texts(serve(Engine(target, None, SETTINGS), PROMPTS[:2], params))
    settings = SETTINGS.replace(graphs="on")
    assert texts(serve(Engine(target, None, settings), PROMPTS[:2], params)) == expected
    monkeypatch.setattr(rounds, "may_judge_itself", lambda requests: True)
    assert texts(serve(Engine(target, None, settings), PROMPTS[:2], params)) != expected


def test_pad_rows_that_wrote_elsewhere_would_be_seen(target, plain):
    """Planted: the scratch block is block 0, or one that a request holds."""
    for block in (None, 0, 1):
        engine = Engine(target, knowing(target, plain, "dspark"), SETTINGS.replace(graphs="on", max_batch=4))
        if block is None:
            assert writes_as_expected(engine, plain)
            continue
        runner_of(engine).scratch = block * SETTINGS.block_size
        assert not writes_as_expected(engine, plain)


def test_recordings_are_bounded(target, plain):
    engine = Engine(target, knowing(target, plain, "dspark"), SETTINGS.replace(graphs="on"))
    recorder = runner_of(engine).recorder
    recorder.most = 3
    assert texts(serve(engine, PROMPTS, params_of(PROMPTS))) == plain
    assert recorder.num_recordings == 3
    assert 0 < runner_of(engine).num_judged < engine.stats.steps


def test_a_broken_row_ends_its_own_request_alone(make_model):
    broken = breaking_on(make_model(num_hidden_layers=2, tie_word_embeddings=False)[0], 250)
    drafter = drafter_for(broken.decoder, **SMALL)
    prompts, params = [[66, 20, 35], [250, 3], [9, 9, 9]], SamplingParams(max_tokens=6, ignore_eos=True)
    expected = Engine(broken, drafter, SETTINGS).generate(prompts, params)
    engine = Engine(broken, drafter, SETTINGS.replace(graphs="on", max_batch=4))
    for _ in range(2):  # the second time in blocks that the broken one left
        done = engine.generate(prompts, params)
        assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in expected]
    assert [c.finish_reason == "error" for c in done] == [False, True, False]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + x.tolist()[0],),
        lambda x: (x + x[0].item(),),
        lambda x: (x if bool(x.all()) else -x,),
        lambda x: (x.nonzero(),),
        lambda x: (x[x > 1],),
        lambda x: (x.masked_select(x > 1),),
    ],
)
def test_what_depends_on_values_is_not_recorded(function):
    with pytest.raises((AssertionError, RuntimeError), match=r"reads values back|depends on data|tracing tensor"):
        FxRecording(function, (torch.tensor([1, 2]),), lambda *outputs: outputs)


def test_a_recording_runs_on_what_its_inputs_hold():
    recorder = Recorder(torch.device("cpu"), most=1)
    stored = torch.zeros(4, dtype=torch.long)

    def function(slots, values):
        stored.index_copy_(0, slots, values)
        return values * 2, None

    for slots, values in (([0, 1], [5, 6]), ([3, 1], [7, 8])):
        doubled, nothing = recorder.run("f", function, (torch.tensor(slots), torch.tensor(values)), lambda *o: o)
        assert doubled.tolist() == [2 * value for value in values]
        assert nothing is None
    assert stored.tolist() == [5, 8, 0, 7]
    assert (recorder.num_recordings, recorder.num_replays) == (1, 2)
    assert recorder.takes("f")
    assert not recorder.takes("g")


def test_static_rows_are_the_packed_ones():
    for lens in ([3, 1, 4], [1], [2, 0, 0], [5, 5]):
        real = torch.tensor([n for n in lens if n])
        rows, is_real = pack_static(torch.tensor(lens), 12)
        expected = pack(real, 12)
        assert torch.equal(rows.requests, expected.requests)
        assert torch.equal(rows.offsets, expected.offsets)
        assert int(is_real.sum()) == expected.num_real
    assert [row_size(n) for n in (1, 8, 9, 12, 13, 17, 25)] == [8, 8, 12, 12, 16, 24, 32]


def test_where_rounds_are_recorded(make_model, target):
    assert not isinstance(Engine(target, None, EngineSettings(max_length=60))._round.runner, RecordedRunner)
    experts = make_model("qwen3_moe")[0]
    Engine(experts, None, EngineSettings(max_length=60))
    with pytest.raises(ConfigError, match="graphs on needs a target without experts"):
        Engine(experts, None, EngineSettings(max_length=60, graphs="on"))
    with pytest.raises(ConfigError, match="set attention to sdpa"):
        Engine(target, None, EngineSettings(max_length=60, graphs="on", attention="flex"))
    with pytest.raises(ConfigError, match="set graphs to off, or tensor_parallel to 1"):
        open_engine(ModelOptions(tensor_parallel=2), EngineSettings(graphs="on"))
