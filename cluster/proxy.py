"""Requests that Ray Serve's HTTP proxy answers by itself: a check of headers, and errors in the API's own shape.

The proxy decodes headers such as X-Request-Id as UTF-8, and answers those that are not with a plain-text 500. It has
more plain-text errors, such as a 404 for every path while no application runs. It calls `middlewares` if
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it, as `specray serve` arranges.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specray.server.errors import INTERNAL_MESSAGE, ApiError, error_response

IMPORT_PATH = "cluster.proxy:middlewares"
MAX_ID_LENGTH = 128
REQUEST_ID = b"x-request-id"
OWN_PATHS = "/-/"  # the proxy's own routes
ROUTES = "/-/routes"
NO_APPLICATION = "no application has this path; its first part chooses the application"
STARTS_OR_STOPS = "the server is starting or shutting down and accepts no requests"


def middlewares() -> list[Middleware]:
    return [Middleware(HeaderCheck), Middleware(ProxyErrors)]


class HeaderCheck:
    """Answers 400 to headers that are not UTF-8, and to request IDs that are unfit for a log line."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope["headers"]) if scope["type"] == "http" else None
        if problem is None:
            await self.app(scope, receive, send)
            return
        response = error_response(ApiError(400, problem, code="invalid_header"))
        response.headers["connection"] = "close"
        await response(scope, receive, send)


class ProxyErrors:
    """Answers in the API's shape where the proxy answers with an error in plain text, which no application does.

    Without any application, because the server starts or stops, a 404 becomes a 503 with Retry-After.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_PATHS):
            await self.app(scope, receive, send)
            return
        replaced: int | None = None

        async def watched_send(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and _is_plain_error(message):
                replaced = message["status"]
            elif replaced is None:
                await send(message)

        await self.app(scope, receive, watched_send)
        if replaced is None:
            return
        if replaced == 404:
            error = ApiError(404, NO_APPLICATION) if await self._has_routes(scope) else ApiError(503, STARTS_OR_STOPS)
        else:
            error = ApiError(replaced, INTERNAL_MESSAGE)
        await error_response(error)(scope, receive, send)

    async def _has_routes(self, scope: Scope) -> bool:
        """Whether the proxy knows an application. It lists them to itself."""
        body = b""

        async def read(message: Message) -> None:
            nonlocal body
            body += message.get("body", b"")

        async def no_body() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        own = {**scope, "method": "GET", "path": ROUTES, "raw_path": ROUTES.encode(), "query_string": b""}
        await self.app(own, no_body, read)
        return body.startswith(b"{") and body != b"{}"


def _is_plain_error(start: Message) -> bool:
    kinds = [value for name, value in start["headers"] if bytes(name).lower() == b"content-type"]
    return start["status"] >= 400 and any(bytes(kind).startswith(b"text/plain") for kind in kinds)


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
