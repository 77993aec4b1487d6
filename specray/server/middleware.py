"""Around the routes: limits of the body, reading its JSON, and a handler for unexpected exceptions."""

import asyncio
import gc
import json
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specray.errors import is_fault
from specray.server.errors import INTERNAL_MESSAGE, ApiError, error_response, short_repr

logger = logging.getLogger(__name__)


class BodyLimit:
    """Reads the whole body before the route runs.

    Answers 413 as soon as it exceeds `max_bytes`, and 408 if it is not complete after `timeout_s`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.timeout_s):
                body = None if self._declares_too_much(scope) else await self._read(receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self.timeout_s:g} s; send the request again")
            await _refuse(error, scope, receive, send)
            return
        if body is None:
            error = ApiError(413, f"the body exceeds this server's limit of {self.max_bytes} bytes; send a shorter one")
            await _refuse(error, scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

    def _declares_too_much(self, scope: Scope) -> bool:
        length = Headers(scope=scope).get("content-length", "")
        return length.isdecimal() and int(length[:20]) > self.max_bytes

    async def _read(self, receive: Receive) -> list[Message] | None:
        """The body's messages; None if they exceed the limit together."""
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
    """Answers an unhandled exception with a 500 in OpenAI's shape. Its details go to the log only."""

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
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.exception("unexpected error in a request")
            if is_started or scope["type"] != "http":
                raise
            await error_response(ApiError(500, INTERNAL_MESSAGE))(scope, receive, send)


class JsonRoute(APIRoute):
    """A route whose JSON body is read by `loads`: two megabytes of small lists must not block the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return loads(await self.body())
        except json.JSONDecodeError:  # its handler names the place
            raise
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body must be JSON, but {_unreadable(error)}") from None


def loads(body: bytes) -> Any:
    """The JSON value of a body. ValueError or RecursionError if there is none, HTTPException if it has NaN or infinity.

    Garbage collection is off meanwhile: every 700 new lists would start one, which took nine tenths of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body, parse_float=_finite, parse_constant=_finite)
    finally:
        if was_enabled:
            gc.enable()


def _unreadable(error: Exception) -> str:
    """Why no JSON could be read, and what to change."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply; flatten it"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8; send it so, and without compression"
    return "an integer in it has too many digits; send a smaller one"


def _finite(number: str) -> float:
    """Numbers that replies may repeat: JSON has no others."""
    if not math.isfinite(value := float(number)):
        raise HTTPException(400, f"the body has the number {short_repr(number)}, which is not finite")
    return value


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without reading the rest of the body, and close the connection on which it would arrive."""
    response = error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that returns the stored messages first."""
    stored = iter(messages)

    async def replayed() -> Message:
        for message in stored:
            return message
        return await receive()

    return replayed
