"""Tool calls and results through chat templates: what the target would write of them is supervised."""

from collections.abc import Callable

import pytest

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Conversation, Message, ToolCall
from dspark.data.template import render

MakeChat = Callable[..., ChatTemplate]

CHATML = (  # the form of Qwen2.5 and Hermes
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace(  # Qwen3: an empty thought stands in the last answer alone
    "{{ m.content }}{% for c",
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}{% for c",
)
NEXT_MARKER = (  # GLM: the marker of the next role closes a turn, and a tool's result has a role of its own
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = ({"type": "function", "function": {"name": "look"}},)
CALL = '<tool_call>look {"at": "sky"}</tool_call>'


def weather(words: str = "", reasoning: str | None = None) -> Conversation:
    call = Message("assistant", words, (ToolCall("look", {"at": "sky"}, "c1"),), reasoning_content=reasoning)
    messages = (
        Message("system", "Be brief."),
        Message("user", "weather?"),
        call,
        Message("tool", "blue", tool_call_id="c1"),
        Message("assistant", "It is blue."),
    )
    return Conversation(messages, "test", tools=TOOLS)


def supervised(chat: ChatTemplate, conversation: Conversation) -> list[str]:
    row = render(chat, conversation, max_length=9999)
    return [chat.tokenizer.decode(row.token_ids[start:end]) for start, end in row.spans]


@pytest.mark.parametrize("words", ["", "Let me look."])
@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_calls_are_supervised_and_results_are_not(make_chat: MakeChat, template: str, words: str) -> None:
    chat = make_chat(template)
    assert supervised(chat, weather(words)) == [f"{words}{CALL}<|im_end|>", "It is blue.<|im_end|>"]


def test_a_call_may_be_the_last_answer(make_chat: MakeChat) -> None:
    conversation = Conversation(weather().messages[:3], "test", tools=TOOLS)
    for template in (CHATML, THINKING):
        assert supervised(make_chat(template), conversation) == [f"{CALL}<|im_end|>"]
    assert supervised(make_chat(NEXT_MARKER), conversation) == ['<call>look{"at": "sky"}<|user|>']


def test_thoughts_before_a_call_are_supervised(make_chat: MakeChat) -> None:
    first, second = supervised(make_chat(THINKING), weather(reasoning="hm"))
    assert first == f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>"
    assert second == "It is blue.<|im_end|>"


def test_an_answer_whose_thoughts_the_template_drops_is_not_supervised(make_chat: MakeChat) -> None:
    keeps_last = THINKING.replace("loop.last or m.reasoning_content", "loop.last")
    messages = [Message("user", "a"), Message("assistant", "b", reasoning_content="hm")] * 2
    spans = supervised(make_chat(keeps_last), Conversation(tuple(messages), "test"))
    assert spans == ["<think>\nhm\n</think>\n\nb<|im_end|>"]


def test_the_template_is_told_of_the_tools(make_chat: MakeChat) -> None:
    chat = make_chat(CHATML)
    text = chat.tokenizer.decode(render(chat, weather(), max_length=9999).token_ids)
    assert text.startswith('<|im_start|>system\nTools: [{"type": "function", "function": {"name": "look"}}]')
    assert "<tool_response>blue</tool_response>" in text
    assert "tools" not in chat.variables
