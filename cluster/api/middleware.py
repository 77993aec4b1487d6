"""Pure ASGI guards around the routes: body size, and errors that nothing else caught.

Not here: errors that a route raises on purpose (`errors`).
"""

import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.errors import INTERNAL_MESSAGE, ApiError, error_response

logger = logging.getLogger(__name__)


class BodyLimit:
    """Reads a request's whole body first and answers 413 as soon as it is longer than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = None if self._announces_too_much(scope) else await self._read(receive)
        if body is None:
            error = ApiError(413, f"the body is longer than {self.max_bytes} bytes, this server's limit; send less")
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

    def _announces_too_much(self, scope: Scope) -> bool:
        length = Headers(scope=scope).get("content-length", "")
        return length.isdecimal() and int(length[:20]) > self.max_bytes

    async def _read(self, receive: Receive) -> list[Message] | None:
        """The body's messages; None when they are too long together."""
        messages: list[Message] = []
        num_bytes = 0
        while True:
            message = await receive()
            messages.append(message)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                return None
            if not message.get("more_body", False):
                return messages


class CatchErrors:
    """Turns an exception that reached the top into a 500 in OpenAI's shape; the details go to the log only."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception:
            logger.exception("unexpected error in a request")
            if is_started or scope["type"] != "http":
                raise
            await error_response(ApiError(500, INTERNAL_MESSAGE))(scope, receive, send)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A receive that gives the stored messages first."""
    stored = iter(messages)

    async def replayed() -> Message:
        for message in stored:
            return message
        return await receive()

    return replayed
