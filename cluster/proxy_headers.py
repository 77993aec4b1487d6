"""A check of request headers in Ray Serve's HTTP proxy, which runs before the application.

The proxy decodes headers such as X-Request-Id as UTF-8, and answers those that are not with a plain-text 500. It calls
`middlewares` if RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it, as `specray serve` arranges.
"""

import json

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

IMPORT_PATH = "cluster.proxy_headers:middlewares"
MAX_ID_LENGTH = 128
REQUEST_ID = b"x-request-id"


def middlewares() -> list[Middleware]:
    return [Middleware(HeaderCheck)]


class HeaderCheck:
    """Answers 400 to headers that are not UTF-8, and to request IDs that are unfit for a log line."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope["headers"]) if scope["type"] == "http" else None
        if problem is None:
            await self.app(scope, receive, send)
            return
        body = {"message": problem, "type": "invalid_request_error", "param": None, "code": "invalid_header"}
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": body}).encode()})


def _problem(headers: list[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if not _is_utf8(name) or not _is_utf8(value):
            return "a header is not UTF-8; send ASCII headers"
        if name.lower() == REQUEST_ID and not (len(value) <= MAX_ID_LENGTH and value.isascii() and _prints(value)):
            return f"X-Request-Id must be at most {MAX_ID_LENGTH} printable ASCII characters; send another or none"
    return None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _prints(value: bytes) -> bool:
    return value.decode("ascii").isprintable()
