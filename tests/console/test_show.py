"""`dspark data show` on a tokenizer of letters: what is trained, what is skipped, in text and in JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark import cli
from dspark.console import show as module
from dspark.console.config import OutputOptions, ShowOptions

SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def target(tmp_path: Path) -> str:
    """A directory with a tokenizer of one token a letter, and no weights."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *"abcdefghij klmn[]?"))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    def talk(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"source": "chat", "messages": [{"role": role, "content": content} for role, content in turns]}

    lines = [
        json.dumps({"id": "one", **talk(("user", "hi"), ("assistant", "[b]a"), ("user", "e"), ("assistant", "fg"))}),
        json.dumps(talk(("user", "abc"))),
        '{"messages": [',
        json.dumps(talk(("user", "a"), ("tool", "b"), ("assistant", "c"))),
        json.dumps(talk(("user", "a"), ("assistant", "b"))),
        json.dumps(talk(("user", "abc"))),
        "[1]",
        json.dumps({"turns": 3}),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dspark", "data", "show", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_trained_text_is_set_apart_and_every_skip_has_its_reason(
    target: str, rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, rows, "--target", target, "--skip-bad", "--limit", "2", "--no-color") == 0
    text = capsys.readouterr().out
    assert "── chat one: 8 of 17 tokens trained" in text
    assert "<|user|>hi<|end|><|assistant|>⟦[b]a<|end|>⟧<|user|>e<|end|><|assistant|>⟦fg<|end|>⟧" in text
    assert "── chat: skipped: no assistant message" in text
    assert "⟦b<|end|>⟧" not in text, "the fifth row is counted, not shown"
    counts = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in text.splitlines() if "│" in line}
    assert counts == {
        "to train on": "2",
        "skipped: no conversation (malformed line)": "3",
        "skipped: no assistant message with content after a message to answer": "2",
        "skipped: the chat template refuses the messages": "1",
    }
    assert "10 of 23 tokens trained" in text


def test_json_has_the_segments_and_the_counts(
    target: str, rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, rows, "--target", target, "--skip-bad", "--json", "--limit", "99") == 0
    *shown, tally = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(shown) == 5
    assert [segment["trained"] for segment in shown[0]["segments"]] == [False, True, False, True]
    assert [segment["end"] for segment in shown[0]["segments"]][-1] == shown[0]["num_tokens"]
    assert "".join(segment["text"] for segment in shown[0]["segments"]).endswith("<|assistant|>fg<|end|>")
    assert shown[2]["skipped"] == "the chat template refuses the messages"
    assert "no tools" in shown[2]["detail"]
    assert tally["rows"] == 2
    assert sum(tally["skipped"].values()) == 6


def test_colours_on_a_terminal(
    target: str, rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Console(force_terminal=True, color_system="standard", highlight=False, width=200)
    monkeypatch.setattr(module, "open_console", lambda output: terminal)
    module.show(ShowOptions(files=(Path(rows),), target=target, limit=1, skip_bad=True, output=OutputOptions()))
    text = capsys.readouterr().out
    assert "\x1b[1;32mfg<|end|>\x1b[0m" in text
    assert "⟦" not in text


def test_a_malformed_line_is_named(
    target: str, rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, rows, "--target", target) == 2
    assert "rows.jsonl: line 3: " in capsys.readouterr().err
