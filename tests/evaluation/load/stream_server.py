"""A small server of streamed chat completions on loopback that knows nothing of ours: words at a fixed pace."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from loopback import QuietHandler, listening

Body = dict[str, Any]
FIRST, GAP = 0.03, 0.01  # seconds
NO_LINE_ENDS = "\x85\u2028 "  # in an event stream, though some libraries take them for such


@dataclass
class StreamServer:
    """What it does, and what it was asked. `fault` names what goes wrong with a request."""

    fault: Callable[[Body], str | None] = lambda body: None
    counts_usage: bool = True
    metrics: bool = False
    api_key: str | None = None
    bodies: list[Body] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    url: str = ""
    most_at_once: int = 0
    rounds: int = 0
    _at_once: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def measured(self) -> list[Body]:
        """The requests that were no probes."""
        return [body for body in self.bodies if body["max_tokens"] != 4]

    def events(self, body: Body) -> Iterator[bytes]:
        """The pieces of a stream."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(FIRST)
        for i in range(body["max_tokens"]):
            yield _event(
                {"choices": [{"index": 0, "delta": {"content": f"w{i}{NO_LINE_ENDS}"}, "finish_reason": None}]}
            )
            time.sleep(GAP)
        if self.fault(body) == "break":
            yield _event({"error": {"message": "out of memory"}})
            return
        with self._lock:
            self._at_once -= 1
            self.rounds += 1
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if self.counts_usage:
            yield _event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2 * body["max_tokens"]}})
        yield b"data: [DONE]\n\n"


def _event(data: Body) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


@contextmanager
def serve(server: StreamServer) -> Iterator[StreamServer]:
    """Serve on a free port, which `server.url` then names."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.0"  # a stream ends with its connection

        def do_GET(self) -> None:
            server.keys.add(self.headers["Authorization"])
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "other"}]}).encode())
            elif self.path == "/metrics" and server.metrics:
                self._send(200, metrics(server.rounds).encode())
            else:
                self._send(404, b"no such page")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            fault = server.fault(body)
            if server.api_key is not None and self.headers["Authorization"] != f"Bearer {server.api_key}":
                self._send(401, b"no such key")
            elif fault is not None and fault.isdecimal():
                self._send(int(fault), f"fault {fault}".encode())
            else:
                self.send_response(200)
                self.end_headers()
                for event in server.events(body):
                    self.wfile.write(event)

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with listening(Handler) as server.url:
        yield server


def metrics(rounds: int) -> str:
    """As vLLM has them: each answer made a round, verified five drafts and accepted three."""
    names = {"num_drafts": 1, "num_draft_tokens": 5, "num_accepted_tokens": 3}
    lines = [f"# TYPE vllm:spec_decode_{name}_total counter" for name in names]
    for name, count in names.items():
        lines += [f'vllm:spec_decode_{name}_total{{engine="{i}"}} {count * rounds / 2}' for i in "01"]
    return "\n".join([*lines, 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0'])
