"""`dspark generate` with everything that edits, bounds and lists: what reaches the engine, and what is printed."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import byte_tokenizer

from dspark import cli
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.weights import save_decoder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over bytes."""
    path = tmp_path_factory.mktemp("models") / "bytes"
    torch.manual_seed(4)
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        layer_types=("full_attention",) * 2,
        eos_token_ids=(0,),
    )
    decoder = Decoder(config)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    save_decoder(decoder, byte_tokenizer(), path)
    return path


@pytest.fixture
def generate(target, monkeypatch, capsys):
    """generate(*flags) -> what `dspark generate` prints on this target."""

    def run(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dspark", "generate", "abc", "--raw", "--target", str(target), *flags])
        cli.main()
        return capsys.readouterr().out

    return run


def test_a_schema_and_log_probabilities(generate, tmp_path):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    flags = ("--json-schema", str(tmp_path / "schema.json"), "--logprobs", "2", "--json", "--temperature", "1")
    rows = [json.loads(line) for line in generate(*flags, "--n", "3", "--seed", "1").splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert json.loads(row["text"]).keys() == {"ok"}
        assert row["finish_reason"] == "stop"
        tokens = row["logprobs"]
        assert "".join(entry["token"] for entry in tokens[:-1]) == row["text"]
        assert all(entry["logprob"] < 0 and len(entry["top"]) == 2 for entry in tokens)
        assert all(entry["top"][0]["logprob"] >= entry["top"][1]["logprob"] for entry in tokens)
    assert "logprobs" not in json.loads(generate("--json", "--max-tokens", "2"))


def test_a_pattern_and_penalties(generate):
    text = generate("--regex", "[a-e]{6}x", "--repetition-penalty", "1.5", "--frequency-penalty", "2").splitlines()[0]
    assert re.fullmatch("[a-e]{6}x", text)
    plain = generate("--regex", "[a-e]{6}x").splitlines()[0]
    assert len(set(text)) > len(set(plain))
    assert plain[0] not in generate("--regex", "[a-e]{6}x", "--bad-words", plain[0]).splitlines()[0]


def test_several_answers_are_printed_one_after_the_other(generate):
    printed = generate("--n", "2", "--temperature", "1", "--seed", "2", "--max-tokens", "5", "--regex", "[a-z]{5}")
    first, second = re.findall(r"answer \d\n([a-z]{5})\n", printed)
    assert first != second
    assert "10 tokens" in printed
