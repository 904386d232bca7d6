"""Rounds that read the cache through flex attention write what others write."""

import pytest
from torch.nn.attention import flex_attention

from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams

from .conftest import CHAIN, drafter_for
from .recorded_parts import PROMPTS, SETTINGS, params_of, serve, texts
from .test_failures import breaking_on

FLEX = SETTINGS.replace(attention="flex")


@pytest.fixture(autouse=True)
def no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU flex attention tells that it is not compiled."""
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"})


@pytest.mark.parametrize(("family", "kind"), [("mistral", {}), ("qwen3", CHAIN)])
def test_text_and_context_are_the_same(family, kind, make_model):
    """Mistral's window is eight tokens."""
    target = make_model(family, num_hidden_layers=2)[0]
    drafter = drafter_for(target.decoder, **(kind | {"num_hidden_layers": 1, "target_layer_ids": (-1, 0)}))
    prompts, params = PROMPTS[:4] + PROMPTS[-1:], params_of(PROMPTS)[:4]
    params.append(SamplingParams(max_tokens=5, temperature=0.8, seed=3))
    expected = texts(serve(Engine(target, drafter, SETTINGS), prompts, params))
    engine = Engine(target, drafter, FLEX)
    assert texts(serve(engine, prompts, params, Engine(target, drafter, SETTINGS))) == expected
    assert engine._round.runner.cache.attention == engine._round.runner.draft_cache.attention == "flex"


def test_the_blocks_of_a_broken_request_are_wiped(make_model, monkeypatch):
    target = breaking_on(make_model("qwen3")[0], 250)
    drafter = drafter_for(target.decoder, target_layer_ids=(0,))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = Engine(target, drafter, SETTINGS).generate([[9, 9, 9], [66, 20, 35]], params)
    for wipes in (True, False):
        engine = Engine(target, drafter, FLEX)
        if not wipes:
            monkeypatch.setattr(engine._round.runner, "wipe", lambda blocks: None)
        assert engine.generate([[3] * 9 + [250, 3]], params)[0].finish_reason == "error"
        done = engine.generate([[9, 9, 9], [66, 20, 35]], params)
        assert ([c.token_ids for c in done] == [c.token_ids for c in expected]) == wipes
