"""How requests and the server end: a client that goes away, SIGTERM, a limit of time, an engine that fails."""

import json
import logging
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from .conftest import Served, serving, wait_for

LONG = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 500, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 40}


class Gate:
    """Lets an engine's steps through one at a time."""

    def __init__(self, served: Served) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False
        self.num_steps = 0
        self._step = served.engine.step
        served.engine.step = self._gated

    def _gated(self):
        if not self._open:
            self._steps.acquire()
        self.num_steps += 1
        return self._step()

    def do(self, step) -> None:
        self._step = step

    def let(self, count: int) -> None:
        self._steps.release(count)

    def open(self) -> None:
        self._open = True
        self._steps.release()


def events(lines: Iterator[str]) -> Iterator[dict]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_within_a_round(make_served, stream, caplog):
    caplog.set_level(logging.INFO, logger="dspark")
    with make_served() as served, httpx.Client(base_url=served.base, timeout=20) as http:
        gate = Gate(served)
        gate.let(3)
        if stream:
            with http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as answer:
                next(events(answer.iter_lines()))
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=LONG, timeout=0.5)
        wait_for(lambda: not served.service.num_requests)
        done = gate.num_steps
        assert done <= 3
        gate.open()  # the step that waits at the gate may still run
        wait_for(lambda: not served.engine.has_work())
        assert gate.num_steps <= done + 1
        assert served.engine.load.running == 0
        (told,) = (record.fields for record in caplog.records if "dropped" in getattr(record, "fields", {}))
        assert told["dropped"] == "disconnect"
        assert 1 <= told["completion_tokens"] <= 5 * done
        assert 'dspark_request_aborted_total{reason="disconnect"} 1.0' in http.get("/metrics").text


def test_a_client_that_goes_away_in_the_queue(make_served):
    with make_served(engine={"max_batch": 1}) as served:
        gate = Gate(served)
        with httpx.Client(base_url=served.base, timeout=20) as http:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=SHORT, timeout=0.3)
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"], "n": 2}, timeout=0.3)
        wait_for(lambda: not served.service.num_requests)
        gate.open()
        wait_for(lambda: not served.engine.has_work())


def test_draining_cuts_no_stream(make_served):
    with make_served() as served, httpx.Client(base_url=served.base, timeout=20) as http:
        gate = Gate(served)
        with http.stream("POST", "/v1/chat/completions", json=SHORT | {"stream": True}) as stream:
            chunks = events(stream.iter_lines())
            gate.let(2)
            next(chunks)
            served.server.drain()
            assert http.get("/ready").status_code == 503
            assert http.get("/health").status_code == 200
            refused = http.post("/v1/chat/completions", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            gate.open()
            last = list(chunks)[-1]
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["speculative"]["rounds"] > 0
        wait_for(lambda: served.server.should_exit)
    assert not served.server.failed


def test_draining_is_bounded(make_served):
    with make_served(limits={"drain_seconds": 0.2}) as served, httpx.Client(base_url=served.base, timeout=20) as http:
        gate = Gate(served)
        with http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as stream:
            chunks = events(stream.iter_lines())
            gate.let(2)
            next(chunks)
            served.server.drain()
            last = list(chunks)[-1]
        assert last["error"]["code"] == "engine_unavailable"
        assert "shutting down" in last["error"]["message"]
        gate.open()


def test_a_request_has_so_much_time(make_served):
    with make_served(limits={"request_seconds": 0.3}) as served:
        gate = Gate(served)
        client = served.client()
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="tiny", messages=LONG["messages"])
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        gate.open()
        wait_for(lambda: not served.engine.has_work())


class Broken(RuntimeError):
    """What the test breaks the engine with."""


def test_an_engine_that_fails(make_engine, caplog):
    with serving(make_engine(), limits={"crash_seconds": 3}) as served, httpx.Client(base_url=served.base) as http:
        gate = Gate(served)
        client = served.client()
        asked = {"model": "tiny", "messages": LONG["messages"], "extra_body": {"ignore_eos": True}}
        caught: list[openai.APIError] = []

        def ask(stream: bool) -> None:
            try:
                answer = client.chat.completions.create(**asked, stream=stream)
                if stream:
                    list(answer)
            except openai.APIError as error:
                caught.append(error)

        asking = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in asking:
            thread.start()
        wait_for(lambda: served.service.engine.num_live == 2)
        gate.let(2)

        def fail() -> list:
            raise Broken

        gate.do(fail)
        gate.open()
        for thread in asking:
            thread.join(10)
        assert len(caught) == 2
        assert all("engine failed" in str(error) for error in caught)
        assert http.get("/health").status_code == http.get("/ready").status_code == 503
        assert "dspark_engine_failed 1.0" in http.get("/metrics").text
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(**asked)
        assert (refused.value.status_code, refused.value.code) == (503, "engine_unavailable")
        wait_for(lambda: served.server.should_exit)
        assert served.server.failed
    assert any(record.exc_info and record.levelname == "CRITICAL" for record in caplog.records)


def test_time_passes(make_served):
    """The engine sleeps while there is nothing to do."""
    with make_served():
        used = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - used < 0.2
