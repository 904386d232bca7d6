"""The official client against `/v1/chat/completions`."""

import openai
import pytest

ASK = [{"role": "user", "content": "abc def"}]


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return served.client()


def test_an_answer_has_openais_shape(client, served):
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index, choice.message.role) == (
        "chat.completion",
        "tiny",
        0,
        "assistant",
    )
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.speculative["rounds"] >= 1


def test_a_stream_is_the_same_answer(client):
    asked = {"model": "tiny", "messages": ASK, "max_tokens": 30, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 30
    assert chunks[-1].speculative["rounds"] == whole.speculative["rounds"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_an_unknown_field_is_named(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, extra_body={"magic": 1})
    assert caught.value.body["param"] == "magic"


def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=ASK)
    assert caught.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["tiny"]
