"""A broken row ends its own request; a useless drafter is called out once."""

import copy
import dataclasses
import logging

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.engine.stats import AcceptanceWatch
from dspark.models.target import Target

PROMPT = [66, 20, 35, 80, 41]
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


def breaking_on(target: Target, token_id: int) -> Target:
    """The target with one token that leaves no finite logit."""
    decoder = copy.deepcopy(target.decoder)
    decoder.embed_tokens.weight[token_id] = float("nan")
    return dataclasses.replace(target, model=decoder)


def test_a_row_without_finite_logits_ends_only_its_request(make_model, make_drafter):
    broken = breaking_on(make_model("qwen3")[0], 250)
    short = PARAMS.replace(max_tokens=12)
    prompts = [PROMPT, [250, 3], [9, 9, 9], [4, 250]]
    for drafter in (None, make_drafter(broken.decoder, target_layer_ids=(0,))):
        for params in (short, short.replace(temperature=1.0, seed=5)):
            engine = Engine(broken, drafter, EngineSettings(max_length=60))
            done = engine.generate(prompts, params)
            assert [c.finish_reason == "error" for c in done] == [False, True, False, True]
            assert [len(c.token_ids) for c in done] == [12, 0, 12, 0]
            again = engine.generate([PROMPT, [9, 9, 9]], params)  # in the blocks that the broken ones left
            assert [c.token_ids for c in again] == [done[0].token_ids, done[2].token_ids]
            engine.check_integrity()


def test_a_row_that_breaks_mid_answer_keeps_what_came_before(make_model, make_scripted):
    target, _ = make_model("qwen3")
    answer = Engine(target).generate([PROMPT], PARAMS)[0].token_ids
    at = next(i for i in range(4, 20) if answer[i] not in answer[:i] and answer[i] not in PROMPT)
    broken = breaking_on(target, answer[at])
    settings = EngineSettings(max_length=60)
    plain = Engine(broken, None, settings).generate([PROMPT], PARAMS)[0]
    assert (plain.token_ids, plain.finish_reason) == (answer[: at + 1], "error")
    # A draft that breaks the cache spoils the whole block it is verified in, so the answer may end some tokens sooner.
    scripted = make_scripted(broken.decoder, {tuple(PROMPT): answer})
    spec = Engine(broken, scripted, settings).generate([PROMPT], PARAMS)[0]
    assert spec.finish_reason == "error"
    assert spec.token_ids == answer[: len(spec.token_ids)]


def test_a_drafter_that_never_hits_is_called_out_once(target, make_drafter, make_scripted, caplog):
    settings = EngineSettings(max_batch=2, max_length=90)
    with caplog.at_level(logging.WARNING, logger="dspark"):
        Engine(target, make_drafter(target.decoder), settings).generate([PROMPT] * 2, PARAMS.replace(max_tokens=70))
    (record,) = caplog.records
    for cause in ("sample_from_anchor", "target_layer_ids", "mask_token_id", "another target"):
        assert cause in record.getMessage()
    caplog.clear()
    answer = Engine(target).generate([PROMPT], PARAMS.replace(max_tokens=70))[0].token_ids
    good = make_scripted(target.decoder, {tuple(PROMPT): answer})
    with caplog.at_level(logging.WARNING, logger="dspark"):
        engine = Engine(target, good, settings)
        engine.generate([PROMPT] * 8, PARAMS.replace(max_tokens=70))
    assert not caplog.records
    assert engine.stats.steps > 50


def test_the_watch_looks_at_the_last_fifty_rounds(caplog):
    watch = AcceptanceWatch()
    for _ in range(100):
        watch.record(8, 20)
    for _ in range(40):
        watch.record(8, 8)
    watch.record(0, 0)
    assert not caplog.records
    for _ in range(60):
        watch.record(8, 8)
    assert len(caplog.records) == 1


def test_phases_are_timed(target, make_drafter):
    engine = Engine(target, make_drafter(target.decoder))
    engine.generate([PROMPT], PARAMS)
    assert set(engine.stats.seconds) == {"prefill", "draft", "plan", "verify", "accept", "commit"}
    assert engine.stats.output_tokens == 30
    assert engine.stats.prompt_tokens == len(PROMPT)
    assert engine.stats.committed == 29
    assert engine.stats.rounds == engine.stats.steps
