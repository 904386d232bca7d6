import json
from pathlib import Path
from typing import Any

import pytest

from dspark.data.conversation import Message, parse_conversation, read_conversations
from dspark.errors import DataError


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_the_three_row_forms(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "source": "chat", "messages": [{"role": "user", "content": "hi"}], "finished": False},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"turns": ["hi", "more"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    ]
    path = write(tmp_path / "rows.jsonl", *map(json.dumps, rows))
    first, second, third, fourth = read_conversations([path])
    assert (first.id, first.source, first.finished) == ("7", "chat", False)
    assert second.messages == (Message("user", "hi"), Message("assistant", "ho"))
    assert (second.id, second.source, second.finished) == (None, "rows", True)
    assert third.messages == (Message("user", "hi"), Message("user", "more"))
    assert fourth.messages[0].content == "ab"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({}, '"messages"'),
        ({"messages": []}, "no message"),
        ({"messages": "hi"}, "messages: expected a list"),
        ({"messages": [{"role": "user"}]}, "messages[0]: the field 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"conversations": ["hi"]}, "conversations[0]"),
        ({"turns": ["hi", 3]}, "turns[1]"),
        ({"turns": ["\ud800"]}, "turns[0]: half of a surrogate"),
        ({"turns": ["hi"], "source": 1}, "source"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls"),
    ],
)
def test_a_bad_row_names_its_field(row: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError) as error:
        parse_conversation(row, "test")
    assert named in str(error.value)


@pytest.mark.parametrize("bad", ['{"turns": ["hi"', '{"turns": [3]}', "[1]"])
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "rows.jsonl", '{"turns": ["one"]}', "", bad, '{"turns": ["two"]}')
    with pytest.raises(DataError, match=r"rows\.jsonl: line 3: .*--skip-bad"):
        list(read_conversations([path]))
    kept = [c.messages[0].content for c in read_conversations([path], skip_bad=True)]
    assert kept == ["one", "two"]
    assert "skipped 1" in caplog.text
