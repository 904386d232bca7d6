"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from dspark.errors import DsparkError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(DsparkError):
    """What a client is told: an HTTP status, and the field at fault where there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that says it."""
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can not be honoured as it stands."""
    return ApiError(400, message, param, code)


def install_handlers(app: FastAPI) -> None:
    """Give every error of an app this shape."""

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return describe(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        return ApiError(error.status_code, f"{where}: {error.detail}", headers=error.headers).response()

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, __: Exception) -> JSONResponse:  # uvicorn logs it
        return ApiError(500, "the server failed at this request; its log says why", code="internal_error").response()


def describe(errors: Sequence[Any], prefix: tuple[str, ...] = ()) -> ApiError:
    """The first fault that pydantic found, with the field's dotted name."""
    first: ErrorDetails = errors[0]
    place = [*prefix, *(part for part in first["loc"] if part not in ("body", "query", "path"))]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first['msg']}")
    param = ".".join(str(part) for part in place if not _is_branch(part)) or None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    match first["type"]:
        case "extra_forbidden":
            problem = f"{param}: this server knows no such field, and honours what it accepts; leave it out"
        case "missing":
            problem = f"{param}: missing; give it a value" if param else "the body is missing: send JSON"
        case "union_tag_invalid":
            problem = f"{param}: not a kind of value that may stand here"
        case "value_error":
            problem = f"{param}: {first['ctx']['error']}" if param else str(first["ctx"]["error"])
        case _:
            problem = f"{param}: {first['msg']}" if param else f"the body: {first['msg']}"
    return bad_request(problem + more, param)


def named_field(error: DsparkError, names: Collection[str]) -> str | None:
    """The field that an error of the engine begins with, if it is one of `names`."""
    word = re.match(r"\w+", str(error))
    return word[0] if word and word[0] in names else None


def _is_branch(part: object) -> bool:
    """Whether a part of a location names a branch of a union, not a field."""
    return isinstance(part, str) and part.startswith("[")
