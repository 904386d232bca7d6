"""The server's log: lines of text or of JSON, each with the id of the request that it is about."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal

# The id of the HTTP request that the running code serves; "" outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def fields(**values: object) -> dict[str, Any]:
    """What to pass as `extra` so that a log line carries these values, those that are None left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def configure(style: Literal["text", "json"]) -> None:
    """Write what dspark and uvicorn log to stderr in one style. Called once, by `dspark serve`."""
    ours = logging.getLogger("dspark")
    for handler in ours.handlers:
        handler.setFormatter(JsonLines() if style == "json" else TextLines())
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.handlers, uvicorn.propagate = list(ours.handlers), False
    uvicorn.setLevel(logging.WARNING)


def _values(record: logging.LogRecord) -> dict[str, Any]:
    """The values that a line carries, the request's id first."""
    given: dict[str, Any] = record.__dict__.get("fields", {})
    current = request_id.get()
    return ({"request_id": current} if current else {}) | given


class TextLines(logging.Formatter):
    """LEVEL name: message, then name=value."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line."""
        return super().formatMessage(record) + "".join(
            f" {name}={_as_word(value)}" for name, value in _values(record).items()
        )


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and the values of the line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | _values(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _as_word(value: object) -> str:
    """A value without blanks or line breaks of its own: what clients send cannot look like lines of the log."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def say(text: str) -> None:
    """Print to whoever started the server."""
    sys.stderr.write(text)
    sys.stderr.flush()
