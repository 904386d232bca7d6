"""A small OpenAI-compatible server on loopback, which can be told to fail in every way that servers do."""

import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from loopback import QuietHandler, listening

Body = dict[str, Any]
HANG = 0.7  # seconds that a hanging request takes


def words(body: Body) -> tuple[str, bool]:
    """An answer of one to eight words, and whether it is whole: depends on the messages, and on the seed if drawn."""
    drawn = body["temperature"] > 0 and body.get("top_k") != 1 and body.get("top_p", 1) > 1e-3
    key = json.dumps([body["messages"], body.get("seed") if drawn else None])
    digest = hashlib.sha256(key.encode()).hexdigest()
    whole = [digest[3 * i : 3 * i + 3] for i in range(1 + int(digest[-1], 16) % 8)]
    return " ".join(whole[: body["max_tokens"]]), len(whole) <= body["max_tokens"]


def no_fault(body: Body, attempt: int) -> str | None:
    return None


@dataclass
class ChatServer:
    """What the server does, and what it was asked: `fault` names what goes wrong with the nth try of a request."""

    answer: Callable[[Body], tuple[str, bool]] = words
    fault: Callable[[Body, int], str | None] = no_fault
    refuses: frozenset[str] = frozenset()
    models: tuple[str, ...] = ("tiny",)
    api_key: str | None = None
    delay: float = 0.0
    bodies: list[Body] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    url: str = ""
    most_at_once: int = 0
    _at_once: int = 0
    _attempts: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def conversations(self) -> list[Body]:
        """The requests that were no probes."""
        return [body for body in self.bodies if body["messages"][0]["content"] != "Tell me a story."]

    def reply(self, path: str, key: str | None, body: Body | None) -> tuple[int, bytes, dict[str, str]] | str:
        """Status, content and headers of the response, or the name of a fault below HTTP."""
        if self.api_key is not None and key != f"Bearer {self.api_key}":
            return 401, b'{"error": "no such key"}', {}
        if path == "/v1/models" and body is None:
            return 200, json.dumps({"data": [{"id": name} for name in self.models]}).encode(), {}
        if path != "/v1/chat/completions" or body is None:
            return 404, b"no such page", {}
        with self._lock:
            self.bodies.append(body)
            attempt = self._attempts[json.dumps(body)]
            self._attempts[json.dumps(body)] += 1
            fault = self.fault(body, attempt)
            if fault is not None:
                self.faults[fault] += 1
        if refused := self.refuses & body.keys():
            return 422, json.dumps({"error": f"unknown field {min(refused)}"}).encode(), {}
        match fault:
            case None:
                return 200, self._completion(body), {}
            case "429":
                return 429, b"slow down", {"Retry-After": "0"}
            case "no json":
                return 200, b"<html>", {}
            case "malformed":
                return 200, b'{"choices": []}', {}
            case "surrogate":
                return 200, self._completion(body).replace(b'"content": "', b'"content": "\\ud800'), {}
            case "hang" | "drop":
                return fault
            case _:
                return int(fault), b"fault", {}

    def _completion(self, body: Body) -> bytes:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.delay)
        text, whole = self.answer(body)
        with self._lock:
            self._at_once -= 1
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop" if whole else "length"}
        return json.dumps({"choices": [choice], "usage": {"completion_tokens": len(text.split())}}).encode()


@contextmanager
def serve(server: ChatServer) -> Iterator[ChatServer]:
    """Serve on a free port, which `server.url` then names."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(server.reply(self.path, self.headers["Authorization"], None))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(server.reply(self.path, self.headers["Authorization"], body))

        def _send(self, reply: tuple[int, bytes, dict[str, str]] | str) -> None:
            if isinstance(reply, str):
                if reply == "hang":
                    time.sleep(HANG)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, content, headers = reply
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    with listening(Handler) as server.url:
        yield server
