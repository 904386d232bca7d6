"""Requests made from the API's own schema, right and wrong ones: none of them breaks the server."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from .conftest import serving

ENDLESS = "/rounds"


@pytest.fixture(scope="module")
def small(make_engine):
    with serving(make_engine(), limits={"max_tokens": 3, "max_answers": 4}) as running:
        yield running
        running.engine.check_integrity()
        assert not running.engine.has_work()


@pytest.mark.parametrize("num_examples", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_no_request_breaks_the_server(small, num_examples):
    schema = schemathesis.openapi.from_url(f"{small.base}/openapi.json")
    statuses: set[int] = set()
    with httpx.Client(base_url=small.base, timeout=20) as http:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path == ENDLESS:
                continue
            modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            for mode in modes if operation.method == "post" else modes[:1]:  # little can be wrong in the others

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(
                    max_examples=num_examples,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                def ask(case):
                    answer = case.call()
                    statuses.add(answer.status_code)
                    assert answer.status_code < 500, case.as_curl_command()
                    if answer.status_code >= 400:
                        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

                ask()
        assert http.get("/health").status_code == 200
    assert {200, 400} <= statuses
