"""The official client against `/v1/completions`."""

import asyncio

import openai
import pytest

ASKED = {"model": "tiny", "prompt": "abc", "max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return served.client()


def test_an_answer_has_openais_shape(client):
    answer = client.completions.create(**ASKED)
    (choice,) = answer.choices
    assert (answer.object, choice.index, choice.finish_reason, choice.logprobs) == (
        "text_completion",
        0,
        "length",
        None,
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 10)
    assert answer.speculative["rounds"] + answer.speculative["accepted"] == 9
    assert (
        client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True}).usage.completion_tokens
        == 16
    )


def test_texts_and_token_ids_are_the_same_prompts(client, served):
    first, second = (client.completions.create(**ASKED | {"prompt": text}).choices[0].text for text in ("abc", "bd"))
    ids = [served.engine.target.tokenizer(text)["input_ids"] for text in ("abc", "bd")]
    assert client.completions.create(**ASKED | {"prompt": ids[0]}).choices[0].text == first
    for prompt in (["abc", "bd"], ids):
        both = client.completions.create(**ASKED | {"prompt": prompt})
        assert [(choice.index, choice.text) for choice in both.choices] == [(0, first), (1, second)]
        assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (5, 20)


def test_streams_of_several_prompts(client):
    asked = ASKED | {"prompt": ["abc", "bd"], "n": 2, "temperature": 1.0, "seed": 5}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts, reasons = dict.fromkeys(range(4), ""), {}
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert reasons == dict.fromkeys(range(4), "length")
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == 5


def test_log_probabilities(client):
    answer = client.completions.create(**ASKED, logprobs=2)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 10
    assert found.text_offset[0] == 0
    for logprob, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert logprob == max(top.values())
    streamed = [c.choices[0].logprobs for c in client.completions.create(**ASKED, logprobs=2, stream=True)]
    pieces = [piece for piece in streamed if piece is not None]
    assert [token for piece in pieces for token in piece.tokens] == found.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == found.text_offset
    assert client.completions.create(**ASKED, logprobs=0).choices[0].logprobs.top_logprobs == [{}] * 10


def test_the_same_words_alone_and_together(served):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0) as client:
            prompts = ["abc", "b", "cdefg", "abc"] * 3
            answers = await asyncio.gather(*(client.completions.create(**ASKED | {"prompt": p}) for p in prompts))
        return [answer.choices[0].text for answer in answers]

    together = asyncio.run(ask())
    alone = [served.client().completions.create(**ASKED | {"prompt": p}).choices[0].text for p in ("abc", "b", "cdefg")]
    assert together == [*alone, alone[0]] * 3
