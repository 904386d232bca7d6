"""Connections on which nobody asks are closed, or they would be held for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

FIRST_REQUEST_SECONDS = 20.0  # for the headers of a connection's first request
KEEP_ALIVE_SECONDS = 65  # between two requests: longer than the minute of common proxies


class WatchedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's HTTP protocol, with a limit to how long a request's headers may take.

    Uvicorn alone counts only the time between an answer and the next byte: it keeps a connection on which nothing was
    ever sent, or half of a request's headers.
    """

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._seen: Any = None  # the request of which the last look knew
        self._watch: asyncio.TimerHandle = self.loop.call_later(FIRST_REQUEST_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Close if there was no new request since the last look, and none is being answered."""
        if self.cycle is self._seen and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
            return
        self._seen = self.cycle
        self._watch = self.loop.call_later(KEEP_ALIVE_SECONDS, self._look)
