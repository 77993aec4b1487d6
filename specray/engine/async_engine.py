"""The step loop in a thread of its own: requests in, batches of outputs out.

`deliver` is called once per step, in the loop's thread, with all outputs of that step; callers hop to
their own event loop there. Every submitted request ends in exactly one output with a finish reason,
also when the loop dies.
"""

import queue
import threading
from collections.abc import Callable

from specray.engine.engine import Engine
from specray.engine.request import EngineRequest
from specray.errors import EngineDeadError
from specray.metrics import Snapshot
from specray.outputs import RequestOutput


class AsyncEngine:
    """Thread-safe front of an `Engine`; start it once, close it once."""

    def __init__(self, engine: Engine, deliver: Callable[[list[RequestOutput]], None]) -> None: ...

    def start(self) -> None: ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises QueueFullError, InvalidRequestError or EngineDeadError; then nothing was queued."""

    def abort(self, request_ids: list[str]) -> None:
        """End requests early; their last output says `abort`. Unknown or finished ids are ignored."""

    def stats(self) -> Snapshot: ...

    @property
    def error(self) -> str | None:
        """Why the loop died, or None while it lives."""

    def close(self) -> None:
        """Stop the loop; whatever was in flight ends with an `error` output."""
