"""`/`: the page in the browser. It holds no secret, so it needs no API key; what it asks for does."""

from __future__ import annotations

from importlib import resources
from pathlib import PurePath

from fastapi import APIRouter, Response

from dspark.server.errors import ApiError

router = APIRouter(include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Only this server's own files and endpoints: no script in the page, no other address, no frame around it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@router.head("/")
@router.get("/")
def page() -> Response:
    """The page itself."""
    return _file("index.html")


@router.head("/web/{name}")
@router.get("/web/{name}")
def part(name: str) -> Response:
    """What belongs to it."""
    return _file(name)


def _file(name: str) -> Response:
    folder = resources.files("dspark.server") / "web"
    kind = _TYPES.get(PurePath(name).suffix)
    if kind is None or name not in {entry.name for entry in folder.iterdir()}:
        raise ApiError(404, f"there is no file {name!r} here", code="not_found")
    return Response((folder / name).read_bytes(), media_type=kind, headers=_HEADERS)
