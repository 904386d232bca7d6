"""What every body must be before its fields are looked at: JSON that says so, of text that can be encoded."""

from __future__ import annotations

import re
from email.message import Message
from typing import Any

from fastapi import Request

from dspark.server.errors import bad_request

_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half of a character, which JSON can write as an escape


async def check_body(request: Request) -> None:
    """Raise ApiError for a body that is not announced as JSON, or that holds text which no tokenizer takes.

    What is not announced is refused, since any page in a browser can send that here without asking first.
    """
    raw = await request.body()
    if not raw:
        return  # nothing was sent: the fields that are missing are named
    if not _is_json(request.headers.get("content-type", "")):
        raise bad_request("the body was not announced as JSON: send the header content-type: application/json")
    if not raw.isascii() or b"\\" in raw:  # else there is no way to write a surrogate
        check_text(await request.json())


def check_text(value: Any, where: str = "") -> None:
    """Raise ApiError that names the first text in a JSON value which holds half of a character."""
    waiting = [(where, value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                problem = "holds half of a surrogate pair, which is no character"
                raise bad_request(f"{place or 'the body'}: its text {problem}", place or None)
        elif isinstance(item, dict):
            for name in item:
                if _SURROGATE.search(name):
                    raise bad_request(f"{place or 'the body'}: the name of a field is not text", place or None)
            waiting += reversed([(f"{place}.{name}".lstrip("."), inner) for name, inner in item.items()])
        elif isinstance(item, list):
            waiting += reversed([(f"{place}.{i}".lstrip("."), inner) for i, inner in enumerate(item)])


def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    kind = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))
