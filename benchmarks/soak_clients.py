"""The clients of `soak_http.py`: what they ask, when they hang up, and what they count."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import string
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

KEY = "soak"
LONGEST = 60  # tokens of an answer
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Prompts. Not a new one each time: tokenizers keep ten thousand pieces of text that they have seen, which takes some
# 20 MiB here and would look like a leak until it is full.
TEXTS = [
    letters.choice(string.ascii_lowercase) + "".join(letters.choices(string.ascii_lowercase + " ", k=size))
    for letters in (random.Random(0),)
    for size in (2, 19, 149) * 300
]
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
TALK = [{"role": "user", "content": "hello"}]
WRONG: list[tuple[str, str, dict[str, Any], int]] = [  # method, path, request, status
    ("POST", CHAT, {"content": b'{"model": "soak", "messa'}, 400),
    ("POST", CHAT, {"content": b"\xff\xfe\x00"}, 400),
    ("POST", CHAT, {"json": {"model": "soak"}}, 400),
    ("POST", CHAT, {"json": {"model": "soak", "messages": []}}, 400),
    ("POST", CHAT, {"json": {"model": "soak", "messages": TALK, "magic": 1}}, 400),
    ("POST", CHAT, {"json": {"model": "soak", "messages": TALK, "temperature": "hot"}}, 400),
    ("POST", CHAT, {"json": {"model": "soak", "messages": TALK, "temperature": -1}}, 400),
    ("POST", CHAT, {"json": {"model": "soak", "messages": TALK, "n": 0}}, 400),
    ("POST", CHAT, {"json": {"model": "soak", "messages": TALK, "n": 1000}}, 400),
    ("POST", CHAT, {"json": {"model": "other", "messages": TALK}}, 404),
    ("POST", TEXT, {"json": {"model": "soak", "prompt": "long " * 1000}}, 400),
    ("POST", TEXT, {"json": {"model": "soak", "prompt": [-1, 2**40]}}, 400),
    ("POST", TEXT, {"json": {"model": "soak", "prompt": "x" * 20_000}}, 413),
    ("POST", "/detokenize", {"json": {"tokens": [10**9]}}, 400),
    ("POST", TEXT, {"json": {"model": "soak", "prompt": "x"}, "headers": {"authorization": "Bearer wrong"}}, 401),
    ("GET", "/v1/nothing", {}, 404),
    ("DELETE", CHAT, {}, 405),
]


@dataclass
class Tally:
    """What came of all requests."""

    requests: int = 0
    disconnects: int = 0
    timeouts: int = 0  # 504, or an error of that kind in a stream: the limit of a request's time
    server_errors: int = 0
    unfinished: int = 0  # answers, read to the end, with a choice that gives no reason for ending
    cut_by_drain: int = 0
    finish: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Something that must not be."""
        self.faults.append(text)

    def refuse(self, asked: str, answer: httpx.Response, *expected: int) -> None:
        """Count an answer that is no 200; it must be one of those expected, in OpenAI's shape."""
        status = answer.status_code
        self.refused[str(status)] += 1
        self.timeouts += status == 504
        self.server_errors += status >= 500 and status != 504
        if status not in (*expected, 504):
            self.fault(f"{asked}: {status}, not {expected}: {answer.text[:200]}")
        elif not isinstance(answer.json().get("error", {}).get("message"), str):
            self.fault(f"{asked}: {status} without a message: {answer.text[:200]}")
        if status == 429 and not answer.headers.get("retry-after", "").isdecimal():
            self.fault(f"{asked}: 429 without Retry-After")

    def fail_stream(self, asked: str, error: dict[str, Any]) -> None:
        """A stream that ended with an error: the time limit may do that, nothing else."""
        if error["code"] == "timeout":
            self.timeouts += 1
        else:
            self.server_errors += 1
            self.fault(f"{asked}: a stream ended with {error}")

    def end(self, asked: str, reasons: list[str | None]) -> None:
        """Count the choices of an answer that was read to its end."""
        self.finish.update(reason for reason in reasons if reason)
        if None in reasons:
            self.unfinished += 1
            self.fault(f"{asked}: finish reasons {reasons}")

    def figures(self) -> dict[str, Any]:
        """As the benchmark reports them."""
        return {
            "requests": self.requests,
            "finish": dict(self.finish.most_common()),
            "disconnects": self.disconnects,
            "refused": dict(sorted(self.refused.items())),
            "timeouts": self.timeouts,
            "unexplained_5xx": self.server_errors,
            "without_finish_reason": self.unfinished,
            "cut_by_drain": self.cut_by_drain,
        }


@dataclass
class Client:
    """Asks one thing after the other, drawn at random."""

    http: httpx.AsyncClient
    tally: Tally
    rng: random.Random

    async def run(self, until: float) -> None:
        """Ask until a time of time.monotonic()."""
        kinds = {
            self.whole: 6, self.stream: 6, self.hang_up_on_a_stream: 3, self.hang_up_on_an_answer: 3,
            self.wrong: 4, self.half_a_request: 1, self.burst: 0.2, self.look: 2, self.watch: 1,
        }  # fmt: skip
        while time.monotonic() < until:
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            full = self.tally.refused["429"]
            try:
                await kind()
            except (httpx.HTTPError, OSError) as error:
                self.tally.fault(f"{kind.__name__}: {error!r}")
            await asyncio.sleep(self.rng.expovariate(1 if self.tally.refused["429"] > full else 20))

    async def whole(self) -> None:
        """A whole answer."""
        path, body = self.draw()
        self.tally.requests += 1
        answer = await self.http.post(path, json=body)
        if answer.status_code == 200:
            self.tally.end(path, [choice["finish_reason"] for choice in answer.json()["choices"]])
        else:
            self.tally.refuse(path, answer, 429)

    async def stream(self) -> None:
        """A stream, read to its end."""
        path, body = self.draw()
        self.tally.requests += 1
        async for _ in events(self.http, self.tally, path, body):
            pass

    async def hang_up_on_a_stream(self) -> None:
        """Leave after some events, or before the first."""
        path, body = self.draw()
        num_events = self.rng.choice((0, 1, 2, 5, 10))
        self.tally.requests += 1
        async with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return self.tally.refuse(path, answer, 429)
            async with aclosing(answer.aiter_lines()) as lines:
                async for line in lines:
                    num_events -= line.startswith("data:")
                    if num_events <= 0:
                        break
        self.tally.disconnects += 1
        return None

    async def hang_up_on_an_answer(self) -> None:
        """Leave while the answer is being made, or is waiting."""
        path, body = self.draw()
        self.tally.requests += 1
        with suppress(TimeoutError):
            answer = await asyncio.wait_for(self.http.post(path, json=body), self.rng.expovariate(10))
            if answer.status_code != 200:
                self.tally.refuse(path, answer, 429)
            return
        self.tally.disconnects += 1

    async def wrong(self) -> None:
        """What must be refused."""
        method, path, request, status = self.rng.choice(WRONG)
        self.tally.requests += 1
        answer = await self.http.request(method, path, **request)
        if answer.status_code == 200:
            self.tally.fault(f"{method} {path} {str(request)[:100]}: 200, not {status}")
        else:
            self.tally.refuse(f"{method} {path}", answer, status)

    async def half_a_request(self) -> None:
        """Hang up in the middle of the headers or the body."""
        url = self.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 500\r\n"
        writer.write(head.encode() + self.rng.choice((b"", b"\r\n", b'\r\n{"model": "so')))
        await writer.drain()
        await asyncio.sleep(self.rng.random() / 5)
        writer.close()
        await writer.wait_closed()
        self.tally.requests += 1
        self.tally.disconnects += 1

    async def burst(self) -> None:
        """More at once than may wait."""
        await asyncio.gather(*(self.rng.choice((self.whole, self.stream))() for _ in range(16)))

    async def look(self) -> None:
        """What does not run the model."""
        method, path, body = self.rng.choice(
            (
                ("GET", "/metrics", None), ("GET", "/health", None), ("GET", "/ready", None), ("GET", "/", None),
                ("GET", "/web/main.js", None), ("GET", "/v1/models", None),
                ("POST", "/tokenize", {"prompt": "count these"}), ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
            )
        )  # fmt: skip
        self.tally.requests += 1
        answer = await self.http.request(method, path, json=body)
        if answer.status_code != 200:
            self.tally.refuse(f"{method} {path}", answer)

    async def watch(self) -> None:
        """Follow the rounds for a moment."""
        self.tally.requests += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(self.rng.random() * 2), self.http.stream("GET", "/rounds?past=8") as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    return self.tally.refuse("GET /rounds", answer, 429)
                async for _ in answer.aiter_lines():
                    pass
        self.tally.disconnects += 1
        return None

    def draw(self) -> tuple[str, dict[str, Any]]:
        """A good request: path and body."""
        rng = self.rng
        words = rng.choice(TEXTS)
        body: dict[str, Any] = {"model": "soak", "max_tokens": rng.randint(1, LONGEST)}
        extras: dict[str, Any] = {
            "n": rng.randint(1, 3), "temperature": rng.choice((0, 0.7, 1.5)), "top_p": 0.9, "seed": rng.randrange(100),
            "stop": [rng.choice(string.ascii_lowercase)], "ignore_eos": True, "presence_penalty": 0.5,
            "logit_bias": {"40": 2.0}, "priority": rng.randint(-2, 2), "min_tokens": 1,
            "speculative": rng.choice(({"mode": "off"}, {"origins": True}, {"max_draft": 0})),
        }  # fmt: skip
        if HAS_GRAMMARS:
            extras["structured_outputs"] = {"choice": ["yes", "no"]}
        for name in rng.sample(list(extras), rng.randint(0, 4)):
            body[name] = extras[name]
        if "structured_outputs" in body:
            body.pop("min_tokens", None)
            body.pop("ignore_eos", None)
        if rng.random() < 0.5:
            return TEXT, body | {"prompt": words}
        return CHAT, body | {"messages": [{"role": "user", "content": words}]}


async def events(http: httpx.AsyncClient, tally: Tally, path: str, body: dict[str, Any]) -> AsyncGenerator[None, None]:
    """Yield once for each event of a stream, and count it at its end."""
    reasons: dict[int, str | None] = {}
    kind, done = "", False
    async with http.stream("POST", path, json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            await answer.aread()
            tally.refuse(path, answer, 429)
            return
        async for line in answer.aiter_lines():  # also at U+2028 and its like: the server must not send them as such
            field_name, _, value = line.partition(": ")
            if field_name == "event":
                kind = value
            elif value == "[DONE]":
                done = True
            elif field_name == "data" and kind == "error":
                tally.fail_stream(path, json.loads(value)["error"])
                return
            elif field_name == "data":
                for choice in json.loads(value)["choices"]:
                    reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
                yield
    tally.end(path, list(reasons.values()) if done and reasons else [None])


async def drained_stream(http: httpx.AsyncClient, tally: Tally, begun: asyncio.Event) -> None:
    """A stream during which the server is told to leave; `begun` is set with its first event."""
    tally.requests += 1
    unfinished, faults = tally.unfinished, len(tally.faults)
    body = {"model": "soak", "prompt": "the end", "max_tokens": LONGEST, "ignore_eos": True}
    try:
        async for _ in events(http, tally, TEXT, body):
            begun.set()
    except httpx.HTTPError as error:
        tally.fault(f"a stream at the end: {error!r}")
    begun.set()
    tally.cut_by_drain += (unfinished, faults) != (tally.unfinished, len(tally.faults))
