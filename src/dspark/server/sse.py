"""Server-sent events, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before its answer was done."""


def event(data: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + dumps(data) + b"\n\n"


def dumps(data: Any) -> bytes:
    """Compact JSON in ASCII: many clients end a line at U+2028, U+0085 and their like too, not at line feeds alone."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


class EventStream(Response):
    """Sends bytes as they come, until they end or the client has gone; then calls `on_close`, once in any case."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(self._send(send), receive)
        except (ClientGone, OSError):  # uvicorn's word for sending to nobody is an OSError
            return
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """Await `work`, but cancel it and raise ClientGone as soon as the client closes the connection."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
