"""Everything that is not honoured is refused, and the field is named."""

import json

import httpx
import pytest

from dspark.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest

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
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
SHARED = [
    ({"magic": 1}, "magic"),
    ({"n": 0}, "n"),
    ({"n": 200}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 599}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"max_tokens": None, "min_tokens": 599}, "min_tokens"),
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
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
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
    ({"max_completion_tokens": 599, "max_tokens": None}, "max_completion_tokens"),
    (messages(USER | {"refusal": "no"}), "messages.0.refusal"),
    (messages(USER | {"annotations": []}), "messages.0.annotations"),
    (messages(USER, {"role": "assistant", "content": "a", "refusal": "no"}), "messages.1.refusal"),
    (messages(USER, {"role": "assistant", "content": "a", "annotations": [{}]}), "messages.1.annotations"),
    (messages(USER, {"role": "assistant", "content": "a", "audio": {"id": "x"}}), "messages.1.audio"),
    (
        messages(USER, {"role": "assistant", "content": "a", "reasoning": "x", "reasoning_content": "y"}),
        "messages.1.reasoning",
    ),
    (messages(USER, {"role": "assistant", "tool_calls": [CALL | {"index": 3}]}), "messages.1.tool_calls.0.index"),
    (messages(USER | {"name": "ann"}), "messages.0.name"),
    (messages(USER | {"name": ""}), "messages.0.name"),
    (messages(USER, ASKS, RESULT | {"name": "g"}), "messages.2.name"),
    (messages(USER, RESULT | {"name": "f"}), "messages.1.name"),
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


HALF = "\ud800"  # of a pair of surrogates: JSON can write it, but it is no character
FUNCTION = {"name": "f"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT | change, param)
        for change, param in (
            (messages(USER | {"content": HALF}), "messages.0.content"),
            (messages(USER | {"content": [{"type": "text", "text": f"a{HALF}b"}]}), "messages.0.content.0.text"),
            (messages(USER, ASKS, RESULT | {"content": HALF}), "messages.2.content"),
            (
                messages(
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [CALL | {"function": {"name": "f", "arguments": json.dumps({"a": HALF})}}],
                    },
                ),
                "messages.1.tool_calls.0.function.arguments.a",
            ),
            ({"tools": [{"type": "function", "function": FUNCTION | {"description": HALF}}]}, "tools.0.function"),
            ({"tools": [{"type": "function", "function": FUNCTION | {"name": HALF}}]}, "tools.0.function.name"),
            ({"chat_template_kwargs": {"enable_thinking": HALF}}, "chat_template_kwargs.enable_thinking"),
            ({"response_format": {"type": "json_object", HALF: 1}}, "response_format"),
            ({"stop": ["a", HALF]}, "stop.1"),
            ({"bad_words": [HALF]}, "bad_words.0"),
            ({"user": HALF}, "user"),
            ({"model": HALF}, "model"),
            ({"structured_outputs": {"choice": [HALF]}}, "structured_outputs.choice.0"),
            ({"structured_outputs": {"json": {"enum": [HALF]}}}, "structured_outputs.json.enum.0"),
        )
    ]
    + [("/v1/completions", TEXT | {"prompt": given}, "prompt") for given in (HALF, ["a", HALF])]
    + [("/tokenize", {"prompt": HALF}, "prompt"), ("/tokenize", messages(USER | {"content": HALF}), "messages.0")],
)
def test_text_that_is_none(http, path, body, param):
    answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
    assert answer.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "tools": [{"type": "function", "function": FUNCTION}]}, "tools"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        (messages(USER) | {"add_special_tokens": False}, "add_special_tokens"),
        (messages(USER | {"name": "ann"}), "messages.0.name"),
        (messages(USER) | {"tools": [{"type": "function", "function": FUNCTION}] * 2}, "tools"),
    ],
)
def test_what_counts_no_tokens_is_named(http, body, param):
    answer = http.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_nulls_are_as_good_as_nothing(http):
    for path, body, model in (
        ("/v1/chat/completions", CHAT, ChatRequest),
        ("/v1/completions", TEXT, CompletionRequest),
        ("/tokenize", {"prompt": "a"}, TokenizeRequest),
    ):
        nulls = dict.fromkeys([*model.model_fields, "store", "metadata", "anything"])
        assert http.post(path, json=nulls | body).status_code == 200
    spoken = USER | dict.fromkeys(["name", "refusal", "audio", "function_call", "annotations"])
    assert http.post("/v1/chat/completions", json=CHAT | messages(spoken)).status_code == 200
    missing = http.post("/v1/chat/completions", json=CHAT | {"messages": None}).json()["error"]
    assert missing["param"] == "messages"


def test_the_header_that_is_missing_is_named(http):
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        for path in ("/v1/completions", "/tokenize"):
            answer = http.post(path, content=json.dumps(TEXT), headers=headers)
            assert answer.status_code == 400
            assert "content-type: application/json" in answer.json()["error"]["message"]


def test_the_context_bounds_what_may_be_asked_for(http, make_served):
    room = 600 - len("user: ab\nassistant: ")
    full = CHAT | {"ignore_eos": True, "speculative": {"mode": "off"}}
    refused = http.post("/v1/chat/completions", json=full | {"max_tokens": room + 1}).json()["error"]
    assert (refused["param"], str(room) in refused["message"]) == ("max_tokens", True)
    assert http.post("/v1/chat/completions", json=full | {"max_tokens": room}).json()["usage"]["total_tokens"] == 600
    with make_served(limits={"max_tokens": 3}) as served, httpx.Client(base_url=served.base, timeout=20) as small:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            refused = small.post(path, json=body | {"max_tokens": 4}).json()["error"]
            assert (refused["param"], "3" in refused["message"]) == ("max_tokens", True)
            answer = small.post(path, json=body | {"max_tokens": None, "ignore_eos": True}).json()
            assert answer["usage"]["completion_tokens"] == 3


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
