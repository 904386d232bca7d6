import json
from pathlib import Path
from typing import Any

import pytest

from dspark.data.conversation import Message, ToolCall, parse_conversation, read_conversations
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


def test_tool_calls_results_and_system_turns_are_kept() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    api = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "blue", "tool_call_id": "c1", "name": "look"},
        {"role": "assistant", "content": "It is blue."},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    row = parse_conversation({"messages": api, "tools": tools}, "test")
    assert row.tools == tuple(tools)
    assert [m.role for m in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2].tool_calls == (ToolCall("look", {"at": "sky"}, "c1"),)
    assert row.messages[2].as_dict() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}],
        "reasoning_content": "hm",
    }
    assert row.messages[3].as_dict() == api[3]
    again = [m.as_dict() for m in row.messages]
    assert parse_conversation({"messages": again}, "test").messages == row.messages
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sky"}}'},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "It is blue."},
    ]
    other = parse_conversation({"conversations": sharegpt, "tools": json.dumps(tools)}, "test")
    assert other.tools == row.tools
    assert [m.role for m in other.messages] == [m.role for m in row.messages]
    assert other.messages[2] == Message("assistant", "", (ToolCall("look", {"at": "sky"}),))
    sharegpt[3]["from"] = "function"
    assert parse_conversation({"conversations": sharegpt}, "test").messages == other.messages
    old = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": "sky"}'}}
    assert parse_conversation({"messages": [old]}, "test").messages == other.messages[2:3]


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
        ({"turns": ["hi"], "tools": "[{]"}, "tools: not valid JSON"),
        ({"turns": ["hi"], "tools": ["f"]}, "tools[0]: expected an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages[0].tool_calls[0].arguments: expected an object",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "conversations[0].value: not valid JSON"),
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
    assert caplog.text.count("skipped 1") == 1
    found: list[str] = []
    assert len(list(read_conversations([path], skip_bad=True, bad=found))) == 2
    assert [problem.startswith(f"{path}: line 3: ") for problem in found] == [True]
