"""A target with 8-bit weights: speculation follows it, not the stored one, whichever kernels the rows take."""

import logging
from pathlib import Path

import pytest
import torch

from dspark.drafters.layouts.deepspec import write_drafter
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import open_engine
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError
from dspark.models import quantized
from dspark.models.target import load_target

from .conftest import drafter_for, random_model

PROMPTS = [[(7 * i * i + 13 * n) % 255 + 1 for i in range(n)] for n in (1, 5, 13, 31)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SETTINGS = EngineSettings(max_batch=3, max_length=80, block_size=4)


@pytest.mark.parametrize("choice", [("plain", "plain"), ("int8", "plain")])
def test_greedy_text_is_that_of_plain_decoding(choice, tmp_path: Path, monkeypatch, make_scripted):
    monkeypatch.setattr(quantized, "choose_quantized", lambda *shape: choice)
    random_model(tmp_path, "llama", hidden_size=64, intermediate_size=64, vocab_size=272)
    target = load_target(tmp_path, "float32", weights="int8")
    try:
        plain = Engine(target, None, SETTINGS).generate(PROMPTS, PARAMS)
    except RuntimeError as error:
        pytest.skip(f"no {choice[0]} kernel here: {error}")
    answers = {tuple(prompt): answer.token_ids for prompt, answer in zip(PROMPTS, plain, strict=True)}
    for wrong_every in (0, 3):
        drafter = make_scripted(target.decoder, answers, wrong_every)
        spec = Engine(target, drafter, SETTINGS).generate(PROMPTS, PARAMS)
        assert [c.token_ids for c in spec] == [c.token_ids for c in plain]
        assert min(c.tau for c in spec) > 1.5
    stored = load_target(tmp_path, "float32")
    assert [c.token_ids for c in Engine(stored, None, SETTINGS).generate(PROMPTS, PARAMS)] != list(answers.values())


def test_a_drafter_for_the_stored_weights_is_taken_with_a_notice(tmp_path: Path, caplog):
    random_model(tmp_path / "target", "llama")
    target = load_target(tmp_path / "target", "float32", pack=False)
    write_drafter(drafter_for(target.decoder), tmp_path / "drafter", provenance={"target_digest": target.digest})
    options = ModelOptions(target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"), weights="int8")
    with caplog.at_level(logging.WARNING, "dspark"):
        engine = open_engine(options, SETTINGS)
    assert "made for this target's stored weights, not for int8" in caplog.text
    assert engine.target.digest != target.digest


def test_refusals():
    with pytest.raises(ConfigError, match="tensor_parallel"):
        ModelOptions.from_dict({"weights": "int8", "tensor_parallel": 2}, "options")
    with pytest.raises(ConfigError, match="weights int8 run on the CPU only"):
        open_engine(ModelOptions(weights="int8"), SETTINGS, torch.device("meta"))
