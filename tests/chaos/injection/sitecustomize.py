"""Fault injection for the test cluster: SIGUSR1 makes a drafter send invalid replies, SIGUSR2 makes a rank slow.

Python imports a module of this name at startup if it is on the path, as in all processes of the test cluster (see
`service`). The product has no such signals.
"""

import random
import signal
import time
from collections.abc import Callable
from typing import Any

SLOW_STEP_S = 0.02

Corruption = Callable[[Any], Any]  # of a valid reply; bytes are sent unpacked


def _corrupt_replies(*_: object) -> None:
    from specray.worker.remote_drafter import server

    corrupt, pack = random.SystemRandom().choice(CORRUPTIONS), server.pack

    def corrupted(message: Any) -> bytes:
        reply = corrupt(message)
        return reply if isinstance(reply, bytes) else pack(reply)

    server.pack = corrupted


def _slow_down(*_: object) -> None:
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


CORRUPTIONS: list[Corruption] = [
    _noise,
    lambda reply: reply._replace(num_nodes=b"", tokens=b"", parents=b""),
    lambda reply: reply._replace(number=reply.number + 1),
    lambda reply: reply._replace(tokens=_filled(reply.tokens, 10**9)),
    lambda reply: reply._replace(tokens=_filled(reply.tokens, -5)),
    lambda reply: reply._replace(parents=_filled(reply.parents, 10**6)),
    lambda reply: reply._replace(tokens=reply.tokens * 100, parents=reply.parents * 100),
]

signal.signal(signal.SIGUSR1, _corrupt_replies)
signal.signal(signal.SIGUSR2, _slow_down)
