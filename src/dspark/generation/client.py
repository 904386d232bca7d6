"""One OpenAI-compatible server: chat completions asked for and read, its failures told apart.

`Unavailable` may pass and is worth another try; `Refused` will be the same next time.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import httpx

from dspark.data.conversation import Message
from dspark.data.fields import text
from dspark.errors import ConfigError, DataError, DsparkError, RequestError
from dspark.generation.config import RemoteSettings

T = TypeVar("T")

_CONNECT_TIMEOUT = 10.0  # seconds until a connection stands
_PASSING = {  # HTTP statuses that say: later
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.CONFLICT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
}
_QUOTED = 300  # characters of a server's message that errors repeat


class Unavailable(DsparkError):
    """The server gave no usable answer; `retry_after` is how many seconds it asks to wait, if it does."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(RequestError):
    """The server does not take this request."""


class Answer(NamedTuple):
    """The message of a completion, its tokens (0 if the server does not count them), and whether it ended itself."""

    message: Message
    num_tokens: int
    finished: bool


@dataclass(eq=False)
class Client:
    """The server at `url`. Use as an asynchronous context manager.

    `left_out` names the fields that requests to it must not have, because it refuses them.
    """

    url: str
    remote: RemoteSettings
    api_key: str | None = None
    left_out: frozenset[str] = frozenset()
    _http: httpx.AsyncClient = field(init=False, repr=False)

    def __post_init__(self) -> None:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"endpoints: {self.url}: {error}") from None
        self._http = httpx.AsyncClient(
            base_url=url if url.path.strip("/") else url.copy_with(path="/v1"),
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=httpx.Limits(max_keepalive_connections=self.remote.concurrency),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the models that the server lists. Raises as `complete` does."""
        listed = await self._ask("GET", "models", None)
        try:
            return [str(model["id"]) for model in listed["data"]]
        except (KeyError, TypeError):
            raise Unavailable(f"{self.url}: its list of models is malformed: {_quote(listed)}") from None

    async def complete(self, body: dict[str, Any]) -> Answer:
        """The answer to a chat-completions request, `left_out` fields aside.

        Raises `Unavailable`, `Refused`, and `ConfigError` for an API key that the server does not accept.
        """
        kept = {key: value for key, value in body.items() if key not in self.left_out}
        return self._read(await self._ask("POST", "chat/completions", kept))

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            async with asyncio.timeout(self.remote.timeout):
                response = await self._http.request(method, path, json=body)
        except TimeoutError:
            raise Unavailable(f"{self.url}: no answer within {self.remote.timeout:g} seconds") from None
        except httpx.RequestError as error:
            raise Unavailable(f"{self.url}: {type(error).__name__}: {error}") from None
        self._check(response)
        try:
            return response.json()
        except ValueError:
            raise Unavailable(f"{self.url}: the answer is no JSON: {_quote(response.text)}") from None

    def _check(self, response: httpx.Response) -> None:
        """Raise what a status other than success means."""
        status = response.status_code
        if response.is_success:
            return
        message = f"{self.url}: HTTP {status}: {_quote(response.text)}"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ConfigError(f"{message}; remote.api_key_env names the environment variable that holds the API key")
        if status in _PASSING or response.is_server_error:
            raise Unavailable(message, _seconds(response.headers.get("Retry-After", "")))
        raise Refused(message)

    def _read(self, completion: Any) -> Answer:
        """Check and take a completion apart."""
        try:
            choice = completion["choices"][0]
            reason, message = choice["finish_reason"], choice["message"]
            content = message["content"]
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            num_tokens = int((completion.get("usage") or {}).get("completion_tokens") or 0)
            if reason not in ("stop", "length"):
                raise Refused(f"{self.url}: the answer ended with {reason!r}")
            if reasoning:  # the thoughts may have taken all the tokens
                reasoning, content = text(reasoning, "reasoning_content"), content or ""
            answer = Message("assistant", text(content, "content"), reasoning_content=reasoning or None)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, DataError):
            raise Unavailable(f"{self.url}: the completion is malformed: {_quote(completion)}") from None
        return Answer(answer, num_tokens, reason == "stop")


async def retry(remote: RemoteSettings, ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` gives, asked again after a growing wait when it raises `Unavailable`; the last one is raised."""
    for attempt in range(1, remote.max_attempts):
        try:
            return await ask()
        except Unavailable as error:
            wait = backoff(remote, attempt, error.retry_after)
        await asyncio.sleep(wait)
    return await ask()


def backoff(remote: RemoteSettings, num_failures: int, retry_after: float = 0.0) -> float:
    """Seconds to wait after so many failures in a row: exponential, with a random part, so that waiters spread."""
    longest = min(remote.max_backoff, remote.backoff * 2.0 ** min(num_failures - 1, 100))
    return max(longest * random.uniform(0.5, 1.0), min(retry_after, remote.max_backoff))


async def together(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all jobs at once; when one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _seconds(header: str) -> float:
    """The Retry-After header as seconds; 0 where it is absent or a date."""
    return float(header) if header.strip().isdecimal() else 0.0


def _quote(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= _QUOTED else f"{shown[:_QUOTED]}…"
