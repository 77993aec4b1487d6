"""Doors into the chaos cluster's processes: SIGUSR1 makes a drafter lie from its next answer on, SIGUSR2 a rank slow.

Python imports a module of this name as it starts, where it is on the path, as in all of that cluster (`service`). The
product has no such doors.
"""

import random
import signal
import time
from collections.abc import Callable
from typing import Any

SLOW_STEP_S = 0.02

Lie = Callable[[Any], Any]  # from the answer that would be right; bytes are sent as they are


def _go_mad(*_: object) -> None:
    from specray.worker.remote_drafter import server

    lie, pack = random.SystemRandom().choice(LIES), server.pack

    def lying(message: Any) -> bytes:
        said = lie(message)
        return said if isinstance(said, bytes) else pack(said)

    server.pack = lying


def _go_slow(*_: object) -> None:
    from specray.worker.worker import Worker

    execute = Worker.execute

    def slowly(self: Worker, plan: Any) -> Any:
        time.sleep(SLOW_STEP_S)
        return execute(self, plan)

    Worker.execute = slowly  # type: ignore[method-assign]


def _noise(_: Any) -> bytes:
    return random.randbytes(64)


def _filled(array: bytes, value: int) -> bytes:
    """An int32 array of the same size."""
    return value.to_bytes(4, "little", signed=True) * (len(array) // 4)


LIES: list[Lie] = [
    _noise,
    lambda reply: reply._replace(num_nodes=b"", tokens=b"", parents=b""),
    lambda reply: reply._replace(number=reply.number + 1),
    lambda reply: reply._replace(tokens=_filled(reply.tokens, 10**9)),
    lambda reply: reply._replace(tokens=_filled(reply.tokens, -5)),
    lambda reply: reply._replace(parents=_filled(reply.parents, 10**6)),
    lambda reply: reply._replace(tokens=reply.tokens * 100, parents=reply.parents * 100),
]

signal.signal(signal.SIGUSR1, _go_mad)
signal.signal(signal.SIGUSR2, _go_slow)
