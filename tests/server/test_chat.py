"""The official client against `/v1/chat/completions`."""

import json
import math

import openai
import pytest
from tiny_tokenizer import byte_tokenizer

ASK = [{"role": "user", "content": "abc def"}]
ASKED = {"model": "tiny", "messages": ASK, "max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return served.client()


def ask(client: openai.OpenAI, extra: dict[str, object] | None = None, **changes: object):
    fields = ASKED | changes
    return client.chat.completions.create(**fields | {"extra_body": fields["extra_body"] | (extra or {})})


def words(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_an_answer_has_openais_shape(client):
    answer = ask(client, max_tokens=12)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index, choice.message.role) == (
        "chat.completion",
        "tiny",
        0,
        "assistant",
    )
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    figures = answer.speculative
    assert figures["accepted"] == sum(figures["accepted_by_position"]) <= figures["drafted"] <= figures["proposed"]
    assert figures["rounds"] + figures["accepted"] == 11  # all but the token of the prompt's last row
    assert 0 <= figures["queue_seconds"] <= figures["first_token_seconds"] <= figures["total_seconds"]


def test_a_stream_is_the_same_answer(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert words(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 16
    assert chunks[-1].speculative["rounds"] == whole.speculative["rounds"]
    assert len({chunk.id for chunk in chunks}) == 1
    without = list(ask(client, stream=True))
    assert all(chunk.usage is None for chunk in without)
    assert without[-1].speculative["rounds"] == whole.speculative["rounds"]


def test_speculation_changes_no_word(client):
    whole = ask(client)
    plain = ask(client, {"speculative": {"mode": "off"}})
    assert plain.choices[0].message.content == whole.choices[0].message.content
    assert (plain.speculative["rounds"], plain.speculative["accepted_length"]) == (0, None)
    assert ask(client, {"speculative": {"max_draft": 0}}).speculative["rounds"] == 0
    narrow = ask(client, {"speculative": {"max_draft": 2}})
    assert narrow.choices[0].message.content == whole.choices[0].message.content
    assert 0 < narrow.speculative["drafted"] <= 2 * narrow.speculative["rounds"]
    assert whole.speculative["drafted"] > 2 * whole.speculative["rounds"]
    unsure = ask(client, {"speculative": {"threshold": 1.0}})
    assert unsure.choices[0].message.content == whole.choices[0].message.content
    assert (unsure.speculative["drafted"], unsure.speculative["proposed"] > 0) == (0, True)
    assert ask(client, {"speculative": {"mode": "static"}}).speculative["rounds"] > 0


def test_answers_differ_by_seed_and_repeat_with_it(client):
    sampled = {"temperature": 1.0, "seed": 7, "n": 3}
    first, again = (ask(client, **sampled) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 48
    streamed = dict.fromkeys(range(3), "")
    for chunk in ask(client, **sampled, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_text_ends_before_a_stop_string(client):
    text = ask(client).choices[0].message.content
    stop = text[10:12]
    stopped = ask(client, stop=[stop, "never there"])
    assert stopped.choices[0].message.content == text[: text.find(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert words(list(ask(client, stop=stop, stream=True))) == text[: text.find(stop)]


def test_sampling_fields_reach_the_engine(client):
    text = ask(client).choices[0].message.content
    banned = ask(client, logit_bias={"1": -100, "0": -100}, extra={"bad_words": [text[0]]}).choices[0].message.content
    assert text[0] not in banned
    for name, value in (
        ("presence_penalty", 2.0),
        ("frequency_penalty", 2.0),
    ):
        assert ask(client, **{name: value}, max_tokens=60).choices[0].message.content != text
    assert ask(client, {"repetition_penalty": 5.0}, max_tokens=60).choices[0].message.content != text
    for field in ({"top_k": 1}, {"min_p": 1.0}):
        assert ask(client, field, temperature=1.0).choices[0].message.content == text
    assert ask(client, temperature=1.0, top_p=1e-6).choices[0].message.content == text
    assert ask(client, max_tokens=openai.omit, max_completion_tokens=5).usage.completion_tokens == 5
    ends = ask(client, logit_bias={"0": 100}, extra={"ignore_eos": False})
    assert (ends.choices[0].message.content, ends.choices[0].finish_reason) == ("", "stop")
    assert ends.usage.completion_tokens == 1
    later = ask(client, logit_bias={"0": 100}, extra={"ignore_eos": False, "min_tokens": 4})
    assert later.usage.completion_tokens == 5


def test_log_probabilities(client):
    answer = ask(client, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    entries = choice.logprobs.content
    assert len(entries) == 16
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace").startswith(choice.message.content[:5])
    streamed = [e for chunk in ask(client, logprobs=True, top_logprobs=3, stream=True) if chunk.choices
                for e in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]  # fmt: skip
    assert [e.token for e in streamed] == [e.token for e in entries]
    ended = ask(client, logprobs=True, logit_bias={"0": 100}, extra={"ignore_eos": False})
    assert ended.choices[0].logprobs.content == []  # the end is no text


def test_origins(client):
    answer = ask(client, {"speculative": {"origins": True}})
    tokens = answer.choices[0].tokens
    assert len(tokens) == 16
    assert "".join(token["text"] for token in tokens) == answer.choices[0].message.content
    assert tokens[0]["origin"] == "prefill"
    origins = [token["origin"] for token in tokens]
    assert origins.count("accepted") == answer.speculative["accepted"]
    chunks = list(ask(client, {"speculative": {"origins": True}}, stream=True))
    assert [t for chunk in chunks for t in getattr(chunk.choices[0], "tokens", None) or []] == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_json_answers(client, stream):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for format_ in (
        {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
        {"type": "json_object"},
    ):
        answer = ask(
            client,
            {"ignore_eos": False},
            response_format=format_,
            max_tokens=120,
            logit_bias={str(byte_tokenizer().convert_tokens_to_ids(sign)): 60 for sign in '"}x'},
            stream=stream,
        )
        text = words(list(answer)) if stream else answer.choices[0].message.content
        assert isinstance(json.loads(text), dict)
        if format_["type"] == "json_schema":
            assert json.loads(text)["a"] in ("x", "y")


def test_structured_outputs(client):
    chosen = ask(client, {"ignore_eos": False, "structured_outputs": {"choice": ["left", "right"]}})
    assert chosen.choices[0].message.content in ("left", "right")
    matched = ask(client, {"ignore_eos": False, "structured_outputs": {"regex": "[ab]{3}"}})
    assert set(matched.choices[0].message.content) <= {"a", "b"}


def test_template_variables(client):
    plain, quick = (
        ask(client, {"chat_template_kwargs": {"enable_thinking": thinking}}).usage.prompt_tokens
        for thinking in (True, False)
    )
    assert quick == plain + len("quick\n")


def test_messages_of_every_kind(client):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    said = 'system: be brief\nuser: abcd\nassistant: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n'
    answer = ask(client, messages=messages)
    assert answer.usage.prompt_tokens == len(said + "tool: 2\nassistant: ")
