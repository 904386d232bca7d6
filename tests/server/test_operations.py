"""What whoever runs the server relies on: health, metrics, request ids, keys, limits, the log."""

import asyncio
import json
import logging

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark.server import logs
from dspark.server.sse import event

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 12, "ignore_eos": True}


def figures(http: httpx.Client) -> dict[str, float]:
    """Samples by name and labels."""
    text = http.get("/metrics").text
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.base, timeout=20) as client:
        yield client


def test_health_and_readiness(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}


def test_metrics_count_what_was_done(http, served):
    before = figures(http)
    answer = http.post("/v1/chat/completions", json=CHAT | {"temperature": 0}).json()
    http.post("/v1/chat/completions", json=CHAT | {"magic": 1})
    after = figures(http)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    done = answer["speculative"]
    assert grown["dspark_spec_decode_num_drafts_total"] == done["rounds"]
    assert grown["dspark_spec_decode_num_proposed_tokens_total"] == done["proposed"]
    assert grown["dspark_spec_decode_num_draft_tokens_total"] == done["drafted"]
    assert grown["dspark_spec_decode_num_accepted_tokens_total"] == done["accepted"]
    for position, count in enumerate(done["accepted_by_position"]):
        assert grown[f"dspark_spec_decode_num_accepted_tokens_per_pos_total/{position}"] == count
    lengths = {k: v for k, v in grown.items() if k.startswith("dspark_spec_decode_cap_length_rounds_total")}
    assert sum(lengths.values()) == done["rounds"]
    assert grown["dspark_generation_tokens_total"] == 12
    assert (
        grown["dspark_prompt_tokens_total"] + grown["dspark_prefix_cache_hits_total"]
        == answer["usage"]["prompt_tokens"]
    )
    assert grown["dspark_request_success_total/length"] == 1
    assert grown["dspark_time_to_first_token_seconds_count"] == 1
    assert grown["dspark_http_requests_total/POST//v1/chat/completions/200"] == 1
    assert grown["dspark_http_requests_total/POST//v1/chat/completions/400"] == 1
    for phase in ("prefill", "draft", "verify", "accept", "commit"):
        assert grown[f"dspark_phase_seconds_total/{phase}"] > 0
    assert after["dspark_num_requests_running"] == after["dspark_num_requests_waiting"] == 0
    assert after["dspark_kv_cache_usage_perc"] == after["dspark_engine_failed"] == after["dspark_draining"] == 0
    assert after["dspark_spec_decode_verify_budget"] == served.service.rounds.recent[-1].budget


def test_request_ids_are_taken_and_made(http):
    assert http.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = http.get("/v1/models", headers={"x-request-id": "two words"}).headers["x-request-id"]
    assert made.startswith("req-")
    assert http.post("/v1/completions", json={}).headers["x-request-id"].startswith("req-")
    assert http.get("/nowhere").headers["x-request-id"] != made


def test_log_lines_carry_the_request(http, caplog):
    with caplog.at_level(logging.INFO, logger="dspark"):
        http.post("/v1/chat/completions", json=CHAT | {"user": "ann"}, headers={"x-request-id": "mine-2"})
        http.get("/health")
    (record,) = (record for record in caplog.records if record.name == "dspark.server.middleware")
    assert record.fields["status"] == 200
    assert record.fields["user"] == "ann"
    assert record.fields["completion_tokens"] == 12
    token = logs.request_id.set("mine-2")
    try:
        line = json.loads(logs.JsonLines().format(record))
        text = logs.TextLines().format(record)
    finally:
        logs.request_id.reset(token)
    assert (line["request_id"], line["finish"], line["level"]) == ("mine-2", "length", "info")
    assert line["message"] == "POST /v1/chat/completions"
    assert "request_id=mine-2" in text


def test_no_page_of_another_origin_may_read(http):
    answer = http.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert http.options("/v1/models", headers={"origin": "https://elsewhere.example"}).status_code == 405
    form = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": "text/plain"})
    assert form.status_code == 400  # a page can send this without asking first


def test_tokens_and_back(http, served):
    found = http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert (found["count"], len(found["token_strs"]), found["max_model_len"]) == (3, 3, served.engine.limit)
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "aé"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"] == "user: ab\nassistant: "
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert http.post(path, json=body).status_code == 400


def test_the_schema_tells_the_models_name(http):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["const"] == "tiny"
    assert schemas["TokenizeRequest"]["properties"]["model"]["anyOf"][0]["const"] == "tiny"


def test_tokens_of_messages_are_those_of_a_chat(http, served):
    tokenizer = served.engine.target.tokenizer
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    asked = {"messages": CHAT["messages"], "tools": tools}
    before = tokenizer.chat_template
    try:
        for template in (before, before.replace("tools", "nothing")):  # one that knows no tools
            tokenizer.chat_template = template
            count = http.post("/tokenize", json=asked).json()["count"]
            assert count > 50
            assert http.post("/v1/chat/completions", json=CHAT | asked).json()["usage"]["prompt_tokens"] == count
    finally:
        tokenizer.chat_template = before


def test_head_is_answered(http):
    for path in ("/", "/web/main.js", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert http.head("/v1/models/other").status_code == 404


def test_a_key_where_one_is_set(make_served):
    with make_served(api_key="secret", cors_origins=["https://here.example"]) as served:
        with pytest.raises(openai.AuthenticationError) as caught:
            served.client("wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        assert "secret" not in str(caught.value)
        assert [model.id for model in served.client("secret").models.list()] == ["tiny"]
        with httpx.Client(base_url=served.base) as http:
            for path in ("/v1/models", "/rounds", "/v1/models/tiny"):
                assert http.get(path).status_code == 401
            assert http.post("/tokenize", json={"prompt": "a"}).status_code == 401
            for path in ("/health", "/ready", "/metrics"):
                assert http.get(path).status_code == 200
            origin = {"origin": "https://here.example", "access-control-request-method": "POST"}
            asked = http.options("/v1/models", headers=origin)
            assert asked.headers["access-control-allow-origin"] == "https://here.example"


def test_bodies_have_a_limit(make_served):
    with make_served(limits={"max_body_bytes": 1024}) as served, httpx.Client(base_url=served.base) as http:
        answer = http.post("/tokenize", json={"prompt": "x" * 2000})
        assert answer.status_code == 413
        assert answer.json()["error"]["message"]

        def pieces():
            for _ in range(100):
                yield b" " * 100

        untold = http.post("/tokenize", content=pieces(), headers={"content-type": "application/json"})
        assert untold.status_code == 413  # no length was announced


def test_a_full_queue_is_429(make_served):
    with make_served(engine={"max_batch": 1}, limits={"max_waiting": 0}) as served:

        async def ask() -> tuple[list[int], list[str]]:
            async with httpx.AsyncClient(base_url=served.base, timeout=20) as http:
                answers = await asyncio.gather(
                    *(http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 40}) for _ in range(6))
                )
            return [a.status_code for a in answers], [a.headers.get("retry-after") for a in answers]

        codes, waits = asyncio.run(ask())
        assert sorted(set(codes)) == [200, 429]
        assert all(
            (code == 429) == (wait is not None and int(wait) >= 1) for code, wait in zip(codes, waits, strict=True)
        )


def test_rounds_as_they_come(http, served):
    with http.stream("GET", "/rounds?past=1000") as stream:
        answer = http.post("/v1/chat/completions", json=CHAT | {"temperature": 0}).json()
        seen, lines = [], stream.iter_lines()
        while sum(event["output"] for event in seen) < 11:
            line = next(lines)
            if line.startswith("data: "):
                seen += [e for e in json.loads(line[6:]) if e["request"].startswith(answer["id"])]
    assert len(seen) == answer["speculative"]["rounds"]
    assert sum(told["accepted"] for told in seen) >= answer["speculative"]["accepted"]
    for told in seen:
        assert told["accepted"] <= told["verified"] <= told["drafted"] == len(told["confidence"])
        assert all(0 <= confidence <= 1 for confidence in told["confidence"])
        assert told["drafted"] in (0, 4)  # none for a last token alone
        assert told["budget"] == told["verified"]
        assert told["running"] <= 1
    assert served.service.rounds.num_watchers <= 1


def test_no_text_breaks_a_line_of_a_stream():
    """Clients that split at every line end of Unicode, as httpx does, find whole lines."""
    text = "".join(chr(code) for code in (0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029, 0x4F60, 0x1F600))
    first, *rest = event({"content": text}).decode().splitlines()
    assert json.loads(first.removeprefix("data: ")) == {"content": text}
    assert rest == [""]
