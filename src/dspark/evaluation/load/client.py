"""One OpenAI-compatible server: an answer streamed and timed, its model's name, its counters."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import httpx

from dspark.errors import ConfigError, DsparkError

_CONNECT_SECONDS = 10.0
_QUOTED = 300  # characters of a server's message that errors repeat
_COUNTERS = {  # by the ends of their names, which vLLM's have as well
    "rounds": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}


class Failed(DsparkError):
    """A request had no answer; `refused` where the server said so (429, 4xx), not where it broke."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass
class Reply:
    """A streamed answer; times are seconds of `time.perf_counter`."""

    started: float
    pieces: list[float] = field(default_factory=list)  # when each piece of text came
    ended: float = 0.0
    num_tokens: int = 0  # as the server counts them; pieces, where it does not
    prompt_tokens: int = 0
    finish_reason: str | None = None
    speculative: dict[str, Any] | None = None  # what a dspark server tells of the request


@dataclass(eq=False)
class Client:
    """The server at `url`. Use as an asynchronous context manager."""

    url: str
    api_key: str | None
    timeout: float
    _http: httpx.AsyncClient = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"url: {self.url}: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"url: {self.url}: give http://HOST:PORT")
        self._http = httpx.AsyncClient(
            base_url=url if url.path.strip("/") else url.copy_with(path="/v1"),
            headers={} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The first model that the server lists. Raises ConfigError where there is no such server."""
        try:
            response = await self._http.get("models", timeout=_CONNECT_SECONDS)
            self._check(response.status_code, response.text)
            return str(response.json()["data"][0]["id"])
        except httpx.RequestError as error:
            raise ConfigError(f"url: {self.url} does not answer ({error or type(error).__name__}): start it") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(
                f"url: {self.url} lists no models: give an OpenAI-compatible server, or --model"
            ) from None
        except Failed as error:
            raise ConfigError(f"url: {error}") from None

    async def answer(self, body: Mapping[str, Any]) -> Reply:
        """The streamed answer to a chat-completions request. Raises Failed."""
        reply = Reply(time.perf_counter())
        try:
            async with asyncio.timeout(self.timeout):
                async with self._http.stream("POST", "chat/completions", json=body) as response:
                    if not response.is_success:
                        await response.aread()
                        self._check(response.status_code, response.text)
                    async for chunk in _events(response):
                        _take(chunk, reply, time.perf_counter())
        except TimeoutError:
            raise Failed(f"no answer within {self.timeout:g} seconds") from None
        except httpx.HTTPError as error:
            raise Failed(f"{type(error).__name__}: {error}") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise Failed(f"{self.url}: the stream is not one of chat completions") from None
        reply.ended = time.perf_counter()
        if reply.finish_reason is None:
            raise Failed("the stream ended without a finish reason")
        reply.num_tokens = reply.num_tokens or len(reply.pieces)
        return reply

    async def counters(self) -> dict[str, float] | None:
        """Rounds, drafts verified and drafts accepted so far, by the server's /metrics; None where it tells none."""
        try:
            response = await self._http.get(self._http.base_url.copy_with(path="/metrics"), timeout=_CONNECT_SECONDS)
        except httpx.HTTPError:
            return None
        return read_counters(response.text) if response.is_success else None

    def _check(self, status: int, text: str) -> None:
        if status >= HTTPStatus.BAD_REQUEST:
            refused = status < HTTPStatus.INTERNAL_SERVER_ERROR
            key = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "; api_key_env names the environment variable that holds the API key" if key else ""
            raise Failed(f"{self.url}: HTTP {status}: {_quote(text)}{hint}", refused)


def read_counters(text: str) -> dict[str, float] | None:
    """The counters of speculation in Prometheus' text format, summed over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        for key, ending in _COUNTERS.items():
            if name.endswith(ending):
                found[key] = found.get(key, 0.0) + float(value)
    return found if found.keys() == _COUNTERS.keys() else None


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines as event streams have them: httpx would end one at U+2028 and its like, inside a server's JSON, too."""
    kept = ""
    async for text in response.aiter_text():
        *lines, kept = (kept + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            yield line
    if kept:
        yield kept


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE]."""
    async for line in _lines(response):
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _take(chunk: dict[str, Any], reply: Reply, now: float) -> None:
    """Put one chunk of the stream into the reply. Raises Failed for an error that the server sends in the stream."""
    if "error" in chunk:
        raise Failed(_quote(json.dumps(chunk["error"])))
    for choice in chunk.get("choices", []):
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            reply.pieces.append(now)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    if usage := chunk.get("usage"):
        reply.num_tokens, reply.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    if told := chunk.get("speculative"):
        reply.speculative = told


def _quote(text: str) -> str:
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
