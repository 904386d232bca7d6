"""Everything that is not honoured is refused, and the field is named."""

import httpx
import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
TEXT = {"model": "tiny", "prompt": "ab", "max_tokens": 2}


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.base, timeout=20) as client:
        yield client


def messages(*given: dict[str, object]) -> dict[str, object]:
    return {"messages": list(given)}


def nested(depth: int) -> dict[str, object]:
    """A schema of arrays in arrays."""
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


USER = {"role": "user", "content": "ab"}
SHARED = [
    ({"magic": 1}, "magic"),
    ({"n": 0}, "n"),
    ({"n": 200}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["a", 1]}, "stop.1"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"speculative": {"mode": "sometimes"}}, "speculative.mode"),
    ({"speculative": {"mode": "adaptive"}}, "speculative.mode"),
    ({"speculative": {"threshold": 1.5}}, "speculative.threshold"),
    ({"speculative": {"max_draft": -1}}, "speculative.max_draft"),
    ({"speculative": {"tree": True}}, "speculative.tree"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"priority": 10**9}, "priority"),
]
OF_CHAT = [
    (messages(), "messages"),
    (messages({"role": "judge", "content": "x"}), "messages.0.role"),
    (messages({"role": "user"}), "messages.0.content"),
    (messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}), "messages.0.content"),
    (messages(USER | {"mood": "good"}), "messages.0.mood"),
    (messages(USER | {"tool_call_id": "c"}), "messages.0.tool_call_id"),
    (messages(USER, {"role": "tool", "content": "x"}), "messages.1.tool_call_id"),
    (messages(USER | {"content": "x" * 600}), "messages"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "fish"}}}},
        "response_format",
    ),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools.0.function.name"),
    ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"store": True}, "store"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(100)}}},
        "response_format",
    ),
    (
        messages(
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[" * 10**5}}],
            },
        ),
        "messages.1.tool_calls.0.function.arguments",
    ),
    ({"prompt": "x"}, "prompt"),
]
OF_TEXT = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"prompt": ["a", "b"], "n": 100}, "n"),
]


@pytest.mark.parametrize(
    ("path", "body", "change", "param"),
    [("/v1/chat/completions", CHAT, *case) for case in SHARED + OF_CHAT]
    + [("/v1/completions", TEXT, *case) for case in SHARED + OF_TEXT],
)
def test_the_field_is_named(http, path, body, change, param):
    answer = http.post(path, json=body | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] is not None
    assert error["param"] == param or error["param"].startswith(f"{param}."), error
    assert param.split(".")[-1] in error["message"]


def test_a_prompt_that_is_too_long_has_a_code(http):
    error = http.post("/v1/completions", json=TEXT | {"prompt": "x" * 600}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"]


def test_nulls_are_as_good_as_nothing(http):
    names = (
        "n",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "logit_bias",
        "stream",
        "tools",
        "response_format",
        "logprobs",
    )
    assert http.post("/v1/chat/completions", json=CHAT | dict.fromkeys(names)).status_code == 200


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b'{"model": "tiny", "prompt": "a", "seed": NaN}', b"[" * 10**5]
)
def test_a_body_that_is_no_request(http, content):
    answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_other_paths_and_methods_have_the_same_shape(http):
    for answer, status in ((http.get("/v1/nothing"), 404), (http.get("/v1/completions"), 405)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    wrong = http.post("/v1/completions", json=TEXT | {"model": "other"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/v1/models/tiny").json()["id"] == "tiny"


def test_the_mode_of_a_request_is_the_servers(make_served):
    with make_served(engine={"planner": "lagged"}) as served, httpx.Client(base_url=served.base, timeout=20) as http:
        answers = [
            http.post("/v1/completions", json=TEXT | {"speculative": {"mode": mode}}) for mode in ("adaptive", "off")
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        refused = http.post("/v1/completions", json=TEXT | {"speculative": {"mode": "static"}})
        assert refused.json()["error"]["param"] == "speculative.mode"
