"""Fault injection for the test cluster: SIGUSR1 makes a drafter send invalid replies, SIGUSR2 makes a rank slow.

A prompt of tests.chaos.fatal makes the rank that computes it hang, use all memory or crash, in each engine.

Python imports a module of this name at startup if it is on the path, as in all processes of the test cluster (see
`service`). The product has no such signals.
"""

import importlib.util
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
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

    begin = Worker.begin

    def slowly(self: Worker, plan: Any) -> None:
        time.sleep(SLOW_STEP_S)
        begin(self, plan)

    Worker.begin = slowly  # type: ignore[method-assign]


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


class WorkerHook:
    """An import hook that changes the worker of a rank, as soon as it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002  # the protocol of sys.meta_path
        if name != "specray.worker.worker":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            from tests.chaos.fatal import die_of_requests

            load(module)
            die_of_requests(module.Worker)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WorkerHook())  # type: ignore[arg-type]
signal.signal(signal.SIGUSR1, _corrupt_replies)
signal.signal(signal.SIGUSR2, _slow_down)
