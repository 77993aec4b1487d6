"""HTTP responses over a `RequestStream`: one JSON body, or server-sent events as steps complete.

The contents of chunks live in `replies`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specray.errors import SpecRayError
from specray.outputs import Completion, RequestOutput
from specray.server.errors import INTERNAL_MESSAGE, ApiError, from_engine
from specray.server.monitoring.tracing import CURRENT_TRACE
from specray.server.replies import Reply, dumps, extend
from specray.server.routing.router_pool import RequestStream

logger = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """A reply as server-sent events. The request stream is closed when the response ends for any reason."""

    def __init__(self, request_stream: RequestStream, reply: Reply, headers: Mapping[str, str]) -> None:
        super().__init__(events(request_stream, reply), headers=headers, media_type="text/event-stream")
        self._request_stream = request_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._request_stream.close()


class JsonReply(Response):
    """A reply as one JSON body.

    The request stream is closed when the response ends or the client disconnects. ASGI servers do not cancel a
    response whose client has disconnected, so this class watches for the disconnect itself.
    """

    def __init__(self, request_stream: RequestStream, reply: Reply, headers: Mapping[str, str]) -> None:
        super().__init__(headers=dict(headers), media_type="application/json")
        self._request_stream = request_stream
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        collecting, leaving = asyncio.create_task(self._collect()), asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if collecting.done():
                collecting.result()
                self.body = dumps(self._reply.whole())
                self.headers["content-length"] = str(len(self.body))
                await super().__call__(scope, receive, send)
        finally:
            collecting.cancel()
            leaving.cancel()
            self._request_stream.close()

    async def _collect(self) -> None:
        async for _ in _extended_choices(self._request_stream, self._reply):
            pass


async def events(request_stream: RequestStream, reply: Reply) -> AsyncIterator[bytes]:
    """All events of a stream.

    A failed stream ends with an error event and without the reply's last events, so that clients do not take it for
    complete.
    """
    try:
        if opening := reply.opening():
            yield _encode(reply, opening)
        async for choice, output in _extended_choices(request_stream, reply):
            if chunks := reply.chunks(choice, output):
                yield _encode(reply, chunks)
        yield _encode(reply, reply.closing()) + reply.framing.done
    except SpecRayError as error:
        _fail_trace(error)
        yield _encode(reply, reply.framing.error(from_engine(error)))
    except Exception as error:
        _fail_trace(error)
        logger.exception("unexpected error in a stream")
        yield _encode(reply, reply.framing.error(ApiError(500, INTERNAL_MESSAGE)))


async def _extended_choices(
    request_stream: RequestStream, reply: Reply
) -> AsyncIterator[tuple[Completion, RequestOutput]]:
    """Each output as it arrives, and its choice, which already includes it."""
    trace = CURRENT_TRACE.get()
    async for index, output in request_stream.outputs():
        choice = reply.choices[index]
        extend(choice, output)
        if trace is not None and output.times is not None:
            trace.add_choice(output)
        yield choice, output


def _fail_trace(error: Exception) -> None:
    if (trace := CURRENT_TRACE.get()) is not None:
        trace.fail(error)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _encode(reply: Reply, chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(map(reply.framing.encode, chunks))
