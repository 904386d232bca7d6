from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Conversation, Message
from dspark.data.template import Rendered, RowRefused, SkipReason, render, render_all

MakeChat = Callable[..., ChatTemplate]

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<s>{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (  # thoughts are kept after the last user message only, and an empty block stands where there are none
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set thought = '' %}"
    "{% set said = m.content %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
NEXT_MARKER = (  # GLM: nothing closes a turn but the marker of the next role
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
EOS_AT_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last and m.role == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM_IN_LAST = (  # Mistral: the system text moves into the last user message
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index0 >= messages|length - 2 %}Sys. {% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def talk(*turns: str, system: str | None = None, finished: bool = True) -> Conversation:
    messages = [] if system is None else [Message("system", system)]
    messages += [Message("assistant" if i % 2 else "user", turn) for i, turn in enumerate(turns)]
    return Conversation(tuple(messages), source="test", finished=finished)


def supervised(chat: ChatTemplate, row: Rendered) -> list[str]:
    """The text of each supervised span; the mask must say the same as the spans."""
    mask = [0] * len(row.token_ids)
    for start, end in row.spans:
        mask[start:end] = [1] * (end - start)
    assert row.loss_mask == mask
    return [chat.tokenizer.decode(row.token_ids[start:end]) for start, end in row.spans]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["one<|im_end|>", "two<|im_end|>"]),
        (LLAMA2, [" one </s>", " two </s>"]),
        (GEMMA, ["one<end_of_turn>", "two<end_of_turn>"]),
        (QWEN3, ["one<|im_end|>", "two<|im_end|>"]),
        (NEXT_MARKER, ["one<|user|>", "two<|user|>"]),
        (EOS_AT_END, ["one", "two</s>"]),
        (PLAIN, ["one\n", "two\n"]),
    ],
)
def test_answers_and_their_ends_are_supervised(make_chat: MakeChat, template: str, expected: list[str]) -> None:
    chat = make_chat(template)
    row = render(chat, talk("hi", "one", "more", "two"), max_length=999)
    assert supervised(chat, row) == expected


@pytest.mark.parametrize("template", [CHATML, LLAMA2, GEMMA, QWEN3, NEXT_MARKER, PLAIN])
def test_the_prompt_of_each_answer_is_what_serving_would_send(make_chat: MakeChat, template: str) -> None:
    chat = make_chat(template)
    conversation = talk("hi", "one", "more", "two")
    row = render(chat, conversation, max_length=999)
    for (start, _), index in zip(row.spans, (1, 3), strict=True):
        prompt = chat.prompt_ids(conversation.messages[:index])
        assert row.token_ids[: len(prompt)] == prompt
        thought = chat.tokenizer.decode(row.token_ids[len(prompt) : start])
        assert thought in ("", "<think>\n\n</think>\n\n")


def test_an_answer_equal_to_its_header_is_found(make_chat: MakeChat) -> None:
    chat = make_chat(CHATML)
    row = render(chat, talk("user", "assistant", "<|im_end|>"[:3], "system\nYou help."), max_length=999)
    assert supervised(chat, row) == ["assistant<|im_end|>", "system\nYou help.<|im_end|>"]


def test_a_given_system_message_replaces_the_default_one(make_chat: MakeChat) -> None:
    chat = make_chat(CHATML)
    row = render(chat, talk("hi", "one", system="Be brief."), max_length=999)
    assert "You help." not in chat.tokenizer.decode(row.token_ids)
    assert supervised(chat, row) == ["one<|im_end|>"]


def test_unicode_and_inner_blank_lines_leave_no_hole(make_chat: MakeChat) -> None:
    chat = make_chat(CHATML)
    row = render(chat, talk("hi", "\n\n déjà 漢字 🙂\n\n\nend  \n"), max_length=999)
    assert supervised(chat, row) == ["\n\n déjà 漢字 🙂\n\n\nend  \n<|im_end|>"]


def test_thoughts_are_supervised_where_the_template_keeps_them(make_chat: MakeChat) -> None:
    chat = make_chat(QWEN3)
    first, second = "<think>\nhm\n</think>\n\none", "<think>\noh\n</think>\n\ntwo"
    row = render(chat, talk("hi", first, "more", second), max_length=999)
    # the first answer's thoughts are gone from the text: what is left is not what the target would write
    assert supervised(chat, row) == ["<think>\noh\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize("answer", ["one", "<think>\n\n</think>\n\none"])
@pytest.mark.parametrize("enable_thinking", [True, False])
def test_an_empty_thought_is_context(make_chat: MakeChat, answer: str, enable_thinking: bool) -> None:
    chat = make_chat(QWEN3, enable_thinking=enable_thinking)
    row = render(chat, talk("hi", answer), max_length=999)
    assert "<think>\n\n</think>\n\n" in chat.tokenizer.decode(row.token_ids)
    assert supervised(chat, row) == ["one<|im_end|>"]


def test_no_thinking_in_several_turns(make_chat: MakeChat) -> None:
    chat = make_chat(QWEN3, enable_thinking=False)
    row = render(chat, talk("hi", "<b>one", "more", "two"), max_length=999)
    assert supervised(chat, row) == ["<b>one<|im_end|>", "two<|im_end|>"]


def test_rewritten_history_leaves_only_the_answers_it_can_tell(make_chat: MakeChat) -> None:
    chat = make_chat(SYSTEM_IN_LAST)
    row = render(chat, talk("hi", "one", "more", "two"), max_length=999)
    assert supervised(chat, row) == [" two</s>"]


def test_an_unfinished_answer_has_no_end_of_turn(make_chat: MakeChat) -> None:
    for template in (CHATML, LLAMA2, NEXT_MARKER):
        chat = make_chat(template)
        row = render(chat, talk("hi", "one", "more", "two", finished=False), max_length=999)
        assert supervised(chat, row)[-1].strip() == "two"
        assert row.loss_mask[-1] == 1


def test_cutting_at_max_length(make_chat: MakeChat) -> None:
    chat = make_chat(CHATML)
    conversation = talk("hi", "abcdef", "more", "ghijkl")
    whole = render(chat, conversation, max_length=999)
    (start, end), (later, _) = whole.spans
    cut = render(chat, conversation, max_length=start + 3)
    assert cut.token_ids == whole.token_ids[: start + 3]
    assert supervised(chat, cut) == ["abc"]
    assert supervised(chat, render(chat, conversation, max_length=later)) == ["abcdef<|im_end|>"]
    assert end < later
    for length, reason in ((start, SkipReason.CUT), (start + 1, SkipReason.TOO_SHORT)):
        with pytest.raises(RowRefused) as refusal:
            render(chat, conversation, max_length=length)
        assert refusal.value.reason is reason


@pytest.mark.parametrize(
    ("template", "conversation", "reason"),
    [
        (CHATML, talk("hi"), SkipReason.NO_ANSWER),
        (CHATML, talk("hi", " \n"), SkipReason.NO_ANSWER),
        (GEMMA, talk("hi", "one", system="Be brief."), SkipReason.REFUSED),
        ("{{ messages | length }} {{ messages[0].content }}", talk("hi", "one"), SkipReason.NO_DIFFERENCE),
    ],
)
def test_refusals_have_reasons_and_are_counted(
    make_chat: MakeChat, template: str, conversation: Conversation, reason: SkipReason
) -> None:
    chat = make_chat(template)
    with pytest.raises(RowRefused) as refusal:
        render(chat, conversation, max_length=999)
    assert refusal.value.reason is reason
    skipped: Counter[SkipReason] = Counter()
    assert list(render_all(chat, [conversation, conversation], 999, skipped)) == []
    assert skipped == {reason: 2}


def test_user_header(make_chat: MakeChat) -> None:
    chat = make_chat(CHATML)
    header = chat.user_header("You code.")
    assert header.text == "<|im_start|>system\nYou code.<|im_end|>\n<|im_start|>user\n"
    assert header.stop_token_id == chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert header.stop_text is None
    plain = make_chat(LLAMA2).user_header()
    assert plain == ("<s>[INST] ", None, "[/INST]")


@pytest.mark.slow
def test_the_builtin_target(tmp_path: Path) -> None:
    hub = pytest.importorskip("dspark.models.hub")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hub.resolve_model("smollm2-135m"))
    chat = ChatTemplate(tokenizer)
    row = render(chat, talk("What is 2+2?", "It is 4.", "Sure?", "Yes!"), max_length=999)
    assert supervised(chat, row) == ["It is 4.<|im_end|>", "Yes!<|im_end|>"]
