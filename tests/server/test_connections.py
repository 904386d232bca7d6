"""Connections on which nobody asks, or only begins to, are closed; those that are used are not."""

import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from dspark.server import connections

from .conftest import Served

ASKED = {"model": "tiny", "prompt": "ab", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 0.2)


def connect(served: Served) -> socket.socket:
    address = urlsplit(served.base)
    return socket.create_connection((address.hostname, address.port), timeout=10)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le"])
def test_a_connection_without_a_request_is_closed(make_served, sent: bytes) -> None:
    with make_served() as served, connect(served) as client:
        client.sendall(sent)
        assert client.recv(1) == b""


def test_half_of_a_second_request_is_not_waited_for(make_served) -> None:
    with make_served() as served, connect(served) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea")
        answer = b""
        while more := client.recv(4096):
            answer += more
        assert answer.startswith(b"HTTP/1.1 200")


def test_an_answer_that_takes_longer_than_the_limits_is_not_cut(make_served) -> None:
    with make_served() as served, httpx.Client(base_url=served.base, timeout=20) as http:
        step = served.engine.step

        def slowly():
            time.sleep(0.03)
            return step()

        served.engine.step = slowly
        answer = http.post("/v1/completions", json=ASKED).json()
        assert answer["usage"]["completion_tokens"] == 60
        assert answer["speculative"]["total_seconds"] > 0.6
