"""Errors as clients receive them: OpenAI's JSON shape and an HTTP status, without internal details.

Other exceptions are converted to `ApiError` here.
"""

import json
import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from specray.errors import InvalidRequestError, Overflow, PoisonRequestError, SpecRayError
from specray.server.anthropic.errors import anthropic_error, is_anthropic_route

INTERNAL_MESSAGE = "internal server error, logged on the server; send the request again"
UNSUPPORTED_TYPE = "unsupported_type"  # pydantic's type of an error for an object whose field `type` is not known
RETRY_AFTER_S = {429: 1, 503: 2}
MAX_REPR_LENGTH = 80  # characters of a bad value that an error message repeats

_REPR = reprlib.Repr()  # the parts of a long value are cut before they are joined
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 2 * MAX_REPR_LENGTH
_REPR.maxlist = _REPR.maxdict = MAX_REPR_LENGTH // 4
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    429: "queue_full",
    500: "internal_error",
    503: "service_unavailable",
    504: "timeout",
}


class ApiError(Exception):
    """An error response. `status` determines its type, and code and Retry-After unless they are given."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s or RETRY_AFTER_S.get(status)
        self.overflow = overflow
        self.code = code or _CODES.get(status, "invalid_value")

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.code == PoisonRequestError.code:
            return {"x-should-retry": "false"}  # OpenAI's and Anthropic's clients send other requests again after a 500
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class ErrorResponse(Response):
    """An error as a complete response, in the shape of the API that the route belongs to."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(_ascii(error.body), error.status, error.headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic_route(scope):
            error = self._error
            self.body = _ascii(anthropic_error(error.status, str(error), error.param, error.overflow))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: ApiError) -> Response:
    return ErrorResponse(error)


def from_engine(error: SpecRayError) -> ApiError:
    """Convert an engine error; its status is kept."""
    names = ("param", "code", "retry_after_s", "overflow")
    return ApiError(error.status, str(error), *(getattr(error, name, None) for name in names))


async def handle_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def handle_engine_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SpecRayError)
    return error_response(from_engine(error))


async def handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if not request.headers.get("content-type", "").startswith("application/json"):
        return error_response(ApiError(400, "the body must be JSON; send the header Content-Type: application/json"))
    return error_response(from_validation(error.errors()))


async def handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(ApiError(error.status_code, _http_message(request, error)))
    response.headers.update(error.headers or {})
    return response


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Convert the first of pydantic's errors to a message with the field, the value seen and the bound."""
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    # Parts in brackets are pydantic's: the key of an object, and tags of unions.
    param = ".".join(str(part) for part in first["loc"] if part != "body" and not str(part).startswith("["))
    if isinstance(cause, InvalidRequestError):
        return ApiError(cause.status, str(cause), cause.param or param or None)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {cause} at character {first['loc'][-1]}")
    if not param:
        return ApiError(400, f"the body must be a JSON object: {first['msg']}")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is required", param)
    value = first["input"]
    if first["type"] == UNSUPPORTED_TYPE and isinstance(value, dict):
        param, value = f"{param}.type", value.get("type")
    return ApiError(400, f"{param}={short_repr(value)}: {first['msg']}", param)


def _ascii(body: dict[str, Any]) -> bytes:
    """JSON in ASCII, because a message may repeat text that is not valid Unicode."""
    return json.dumps(body).encode()


def short_repr(value: object) -> str:
    """`repr(value)`, truncated for an error message. Takes the same time for a value of any size."""
    text = _REPR.repr(value)
    return text if len(text) <= MAX_REPR_LENGTH else text[:MAX_REPR_LENGTH] + "…"


def _http_message(request: Request, error: HTTPException) -> str:
    path = short_repr(request.scope["path"])
    if error.status_code == 404:
        return f"there is no route {path}; see /openapi.json for the routes"
    if error.status_code == 405:
        return f"{request.method} is not allowed on {path}"
    return str(error.detail)
