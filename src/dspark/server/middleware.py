"""What every HTTP request passes: its id, its line in the log, its count; and the API key of most."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from typing import Any
from urllib.parse import quote

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.log import get_logger
from dspark.server import logs
from dspark.server.errors import ApiError
from dspark.server.metrics import Metrics

_log = get_logger(__name__)

_ID = re.compile(r"[\x21-\x7e]{1,128}")  # visible ASCII
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")  # others would fill the metrics
_QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds: logged for debugging alone


class RequestContext:
    """Takes or makes the id (`X-Request-Id`), returns it, logs and counts the request when it is over."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        identity = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        status, started = 0, time.perf_counter()
        details: dict[str, Any] = {}
        scope.setdefault("state", {})["log_fields"] = details

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = identity
            await send(message)

        token = logs.request_id.set(identity)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            path = quote(scope["path"])
            method = scope["method"] if scope["method"] in _METHODS else "other"
            known = getattr(scope.get("route"), "path", "unknown")  # or paths that nobody serves fill the metrics
            self.metrics.count_http(known, method, status, seconds)
            extra = logs.fields(status=status, seconds=round(seconds, 4), **details)
            level = logging.DEBUG if path in _QUIET else logging.INFO
            _log.log(level, "%s %s", method, path, extra=extra)
            logs.request_id.reset(token)
        return None


class BodyLimit:
    """Refuses bodies that are too long: by the length that they announce, or once so much of them has come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        error = HTTPException(413, f"the body is longer than the {self.max_bytes} bytes that it may have")
        announced = Headers(scope=scope).get("content-length", "")
        num_bytes = int(announced) if announced.isdecimal() else 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            if num_bytes <= self.max_bytes:
                message = await receive()
                if not announced:
                    num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise error
            return message

        return await self.app(scope, receive_some, send)


async def check_key(request: Request) -> None:
    """Raise ApiError where the server wants a key and the request does not give it."""
    wanted = request.app.state.service.settings.api_key
    if wanted is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(key.strip().encode(), wanted.get_secret_value().encode())
    if scheme.lower() != "bearer" or not right:
        raise ApiError(
            401,
            "a valid API key is missing: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
