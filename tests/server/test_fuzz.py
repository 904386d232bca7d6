"""Requests made from the API's own schema, right and wrong ones: none of them breaks the server."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode

from .conftest import serving

ENDLESS = "/rounds"
ANSWERED = {  # paths of answers, with what stands in for a field that was refused but must be there
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
}


@pytest.fixture(scope="module")
def small(make_engine):
    with serving(make_engine(), limits={"max_tokens": 3, "max_answers": 4}) as running:
        yield running
        running.engine.check_integrity()
        assert not running.engine.has_work()


def answer_in_the_end(http: httpx.Client, path: str, body: dict[str, Any]) -> int:
    """Send a request, each time without the field that was refused, until it is answered; how often it was refused."""
    for count in range(len(body) + 1):
        answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        if answer.status_code == 200:
            assert b"event: error" not in answer.content, body
            return count
        assert answer.status_code == 400, (answer.text, body)
        name = answer.json()["error"]["param"].split(".")[0]
        name = name if name in body else next(iter(ANSWERED[path]))  # as n, by which many prompts were too many
        if name in ANSWERED[path]:
            assert body[name] != ANSWERED[path][name], (answer.text, body)
            body[name] = ANSWERED[path][name]
        else:
            del body[name]
    raise AssertionError((answer.text, body))


def attempt(strategy: SearchStrategy[Case], num_examples: int, ask: Callable[[Case], None]) -> None:
    """Ask with so many requests, the same ones each time."""

    @given(case=strategy)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: Case) -> None:
        ask(case)

    one()


@pytest.mark.parametrize("num_examples", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_no_request_breaks_the_server(small, num_examples):
    schema = schemathesis.openapi.from_url(f"{small.base}/openapi.json")
    statuses: Counter[tuple[str, int]] = Counter()
    refusals: Counter[int] = Counter()  # right requests for answers, by how often they were refused before the answer

    def ask(case: Case) -> None:
        answer = case.call()
        statuses[case.path, answer.status_code] += 1
        assert answer.status_code < 500, case.as_curl_command()
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    def ask_to_the_end(case: Case) -> None:
        ask(case)
        refusals[answer_in_the_end(http, case.path, dict(case.body))] += 1

    with httpx.Client(base_url=small.base, timeout=20) as http:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path != ENDLESS:
                right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
                attempt(right, num_examples, ask_to_the_end if operation.path in ANSWERED else ask)
            if operation.method == "post":  # little can be wrong in the others
                attempt(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), num_examples, ask)
        assert http.get("/health").status_code == 200
    assert {200, 400} <= {status for _, status in statuses}
    assert refusals.total() >= 2 * num_examples  # every one of them was answered in the end
