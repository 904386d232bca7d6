"""Tools: what reaches the model, what is read from its answer, and a call by grammar through the official client."""

import json

import pytest

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.server.errors import ApiError
from dspark.server.schemas import ChatRequest
from dspark.server.tool_reader import ToolReader
from dspark.server.tools import ToolUse, tool_use

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "description": "end it"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
STOP = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
TAGGED = ToolUse(("weather", "stop"))
BARE = ToolUse(("weather", "stop"), style="bare")


def read(use: ToolUse, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The words and calls of an answer that comes in pieces of `size` letters."""
    reader, words, calls = ToolReader(use), "", []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for piece in [*pieces, ""]:
        found = reader.push(piece, last=piece == "")
        words += found.words
        calls += [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls]
    return words, calls


WEATHER = ("weather", '{"city": "Bonn"}')


@pytest.mark.parametrize(
    ("use", "text", "words", "calls"),
    [
        (ToolUse(), CALL, CALL, []),
        (TAGGED, "no call < at all ", "no call < at all ", []),
        (TAGGED, CALL, "", [WEATHER]),
        (TAGGED, f"Let me see.\n{CALL}\n{STOP}\n", "Let me see.", [WEATHER, ("stop", "{}")]),
        (TAGGED, CALL.removesuffix("</tool_call>"), "", [WEATHER]),
        (TAGGED, '<tool_call>{"name": "other"}</tool_call> x', '<tool_call>{"name": "other"}</tool_call> x', []),
        (TAGGED, '<tool_call>{"name": "weath', '<tool_call>{"name": "weath', []),
        (ToolUse(("weather", "stop"), single=True), CALL + STOP, "", [WEATHER]),
        (BARE, '{"name": "weather", "parameters": {"city": "Bonn"}}', "", [WEATHER]),
        (BARE, '[{"name": "stop"}, {"name": "weather", "arguments": {"city": "Bonn"}}]', "", [("stop", "{}"), WEATHER]),
        (BARE, 'It is {"name": "stop"}', 'It is {"name": "stop"}', []),
        (BARE, '{"mood": "fine"}', '{"mood": "fine"}', []),
        (ToolUse(("stop",), forced=True), '{"name": "stop", "arguments": {}}', "", [("stop", "{}")]),
        (ToolUse(("stop",), forced=True), '{"name": "st', '{"name": "st', []),
    ],
)
def test_calls_are_read_however_the_text_comes(use, text, words, calls):
    for size in (1, 2, 3, 7, 1000):
        assert read(use, text, size) == (words, calls)


def used(chat: ChatTemplate, **fields: object) -> ToolUse:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields
    return tool_use(ChatRequest.model_validate(body), chat)


def test_tools_go_through_the_template_or_a_system_message(target):
    chat = ChatTemplate(target.tokenizer)
    use = used(chat)
    assert [tool["function"]["name"] for tool in use.in_template] == ["weather", "stop"]
    assert use.told([Message("user", "x")]) == [Message("user", "x")]
    assert not used(chat, tool_choice="none").active
    template = target.tokenizer.chat_template
    try:
        target.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        plain = used(chat)
    finally:
        target.tokenizer.chat_template = template
    assert not plain.in_template
    first, _ = plain.told([Message("user", "x")])
    assert first.role == "system"
    assert '"name": "weather"' in first.content
    assert '{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}' in first.content
    assert plain.told([Message("system", "Be kind."), Message("user", "x")])[0].content.startswith("Be kind.\n\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict"),
    ],
)
def test_what_does_not_go_together_is_named(target, fields, param):
    with pytest.raises(ApiError) as caught:
        used(ChatTemplate(target.tokenizer), **fields)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be(served, choice, stream):
    answer = served.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "weather?"}],
        tools=TOOLS if choice != "required" else TOOLS[:1],
        tool_choice=choice,
        temperature=0,
        max_tokens=180,
        stream=stream,
        logit_bias={str(served.engine.target.tokenizer.convert_tokens_to_ids(sign)): 60 for sign in '"}'},
    )
    if stream:
        chunks = list(answer)
        (call,) = (call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [])
        reason = chunks[-1].choices[0].finish_reason
        assert call.index == 0
    else:
        (call,) = answer.choices[0].message.tool_calls
        reason = answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert (call.type, call.function.name, reason) == ("function", "weather", "tool_calls")
    assert json.loads(call.function.arguments)["city"] in ("Bonn", "Rome")
