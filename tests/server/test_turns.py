"""Conversations of several turns through the official client, which sends back what it was answered."""

import openai
import pytest

ASK = {"role": "user", "content": "ab"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": ["x"]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return served.client()


def ask(client: openai.OpenAI, *messages: object, **fields: object):
    fields = {"max_tokens": 8, "temperature": 0} | fields
    return client.chat.completions.create(model="tiny", messages=list(messages), **fields)


@pytest.mark.parametrize("back", [lambda m: m, lambda m: m.model_dump(), lambda m: m.model_dump(exclude_none=True)])
def test_an_answer_can_be_sent_back(client, back):
    first = ask(client, ASK, extra_body={"ignore_eos": True, "min_tokens": 4})
    message = first.choices[0].message
    again = ask(client, ASK, back(message), {"role": "user", "content": "cd"})
    said = f"user: ab\nassistant: {message.content}\nuser: cd\nassistant: "
    assert again.usage.prompt_tokens == len(said.encode())


def test_an_answer_of_another_server_can_be_sent_on(client):
    spoken = {"role": "assistant", "content": None, "refusal": "no", "annotations": [], "audio": None}
    assert ask(client, ASK, spoken | {"tool_calls": []}, ASK).usage.prompt_tokens == len(
        "user: ab\nassistant: no\nuser: ab\nassistant: "
    )
    thought = {"role": "assistant", "content": "c", "reasoning": "x"}
    assert ask(client, ASK, thought, ASK).choices[0].message.role == "assistant"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
def test_a_tool_is_called_and_its_result_answered(served, client, stream, as_object):
    answer = ask(
        client,
        ASK,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
        stream=stream,
        logit_bias={str(served.engine.target.tokenizer.convert_tokens_to_ids(sign)): 60 for sign in '"}'},
    )
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or []]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        if not as_object:
            message["tool_calls"] = [call.model_dump() for call in calls]
    else:
        message = answer.choices[0].message if as_object else answer.choices[0].message.model_dump()
        calls = answer.choices[0].message.tool_calls
    (call,) = calls
    result = {"role": "tool", "tool_call_id": call.id, "name": "f", "content": "42"}
    told = ask(client, ASK, message, result, tools=[TOOL])
    assert (
        told.usage.prompt_tokens
        == ask(client, ASK, message, {k: v for k, v in result.items() if k != "name"}, tools=[TOOL]).usage.prompt_tokens
    )
    assert told.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_names_that_the_template_writes(served, client):
    tokenizer = served.engine.target.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = before.replace(
        "{{ m.role }}", "{{ m.role }}{% if m.role == 'user' %}{{ m.name }}{% endif %}"
    )
    try:
        named = ask(client, ASK | {"name": "ann"})
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, ASK | {"name": "ann"}, {"role": "system", "content": "x", "name": "bob"})
    finally:
        tokenizer.chat_template = before
    assert named.usage.prompt_tokens == len("userann: ab\nassistant: ")
    assert caught.value.param == "messages.1.name"
