"""The server that is fuzzed: a toy model in this process, and what must be true of its engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster.config import AppConfig
from tests.support.local_server import LocalServer, local_server

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "max_queued_requests": 4096,
    "speculative": {"algorithm": "NGRAM", "num_draft_tokens": 4},
    "server": {"body_timeout_s": 5.0, "request_timeout_s": 60.0},
}


class FuzzedServer:
    """The application, and what must be true of its engine."""

    def __init__(self, server: LocalServer) -> None:
        self.app = server.app
        self.exits = server.exits
        self._router = server.router
        self._router_pool = server.router_pool

    def leaks(self) -> list[str]:
        """What is still held although no request runs."""
        scheduler = self._router._engine._engine.scheduler
        pool, cache = scheduler.pool, scheduler.cache
        held = {
            "slots": self._router._config.max_running_requests - len(scheduler.slots.free),
            "waiting requests": len(scheduler.waiting),
            "blocks": pool.num_usable - pool.num_free - cache.num_idle,
            "requests at the router": self._router._connections.num_requests,
            "requests at the ingress": sum(len(c._listeners) for c in self._router_pool._clients.values()),
        }
        return [f"{count} {what}" for what, count in held.items() if count]


@asynccontextmanager
async def fuzzed_server(folder: Path) -> AsyncIterator[FuzzedServer]:
    """Serve the model in `folder`."""
    async with local_server(AppConfig(model=str(folder), **OPTIONS)) as server:
        yield FuzzedServer(server)
