"""Reading JSON bodies on the event loop, which two megabytes of small lists must not block."""

import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class JsonRoute(APIRoute):
    """A route whose JSON body is read by `loads`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        return loads(await self.body())


def loads(body: bytes) -> Any:
    """The JSON value of a body. ValueError or RecursionError if there is none.

    Garbage collection is off meanwhile: every 700 new lists would start one, which took nine tenths of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body)
    finally:
        if was_enabled:
            gc.enable()
