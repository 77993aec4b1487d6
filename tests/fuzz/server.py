"""A server in this process without Ray, over a toy model: engine, router and HTTP application are the real ones."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fastapi import FastAPI

import cluster.engine.router
from cluster.api.app import create_app
from cluster.api.service import Service
from cluster.api.tokenization import Tokenization
from cluster.config import AppConfig
from cluster.engine.router import Router
from cluster.routing.router_pool import RouterPool
from specray.engine.engine import Engine
from specray.models.tokenizer import load_tokenizer
from specray.worker.local import LocalExecutor

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


class LocalRanks(LocalExecutor):
    """A `RayExecutor` without Ray."""

    rank_nodes = ("127.0.0.1",)

    def failure(self) -> str | None:
        return None


class FuzzedServer:
    """The application, and what must be true of its engine."""

    def __init__(self, app: FastAPI, router: Router, router_pool: RouterPool, exits: list[int]) -> None:
        self.app = app
        self.exits = exits  # statuses with which the router's process would have ended
        self._router = router
        self._router_pool = router_pool

    def leaks(self) -> list[str]:
        """What is still held although no request runs."""
        scheduler = self._router._engine._engine.scheduler
        pool, cache = scheduler.pool, scheduler.cache
        held = {
            "slots": self._router._config.max_running_requests - len(scheduler._free_slots),
            "waiting requests": len(scheduler.waiting),
            "blocks": pool.num_usable - pool.num_free - cache.num_idle,
            "requests at the router": self._router._connections.num_requests,
            "requests at the ingress": sum(len(c._listeners) for c in self._router_pool._clients.values()),
        }
        return [f"{count} {what}" for what, count in held.items() if count]


@asynccontextmanager
async def fuzzed_server(folder: Path) -> AsyncIterator[FuzzedServer]:
    """Serve the model in `folder`."""
    config = AppConfig(model=str(folder), **OPTIONS)
    tokenizer = load_tokenizer(folder)
    ranks = LocalRanks(config.engine)
    exits: list[int] = []

    def start_engine(_: AppConfig) -> tuple[Any, Engine]:
        return ranks, Engine(config.engine, ranks, tokenizer.backend_tokenizer)

    router = object.__new__(Router)
    with mock.patch.object(cluster.engine.router, "_start_engine", start_engine):
        await Router.__init__(router, config, exit_process=exits.append)  # type: ignore[misc]
    router_pool = RouterPool(_Directory(router), config)
    app = create_app(Service(config, router_pool, lambda length: Tokenization(tokenizer, length)))
    router_pool.start()
    await until(lambda: router_pool.info is not None)
    try:
        yield FuzzedServer(app, router, router_pool, exits)
    finally:
        await router_pool.close()
        for task in router._background:
            task.cancel()
        await asyncio.to_thread(router._engine.close)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition came true in time."""
    give_up = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > give_up:
            return False
        await asyncio.sleep(0.01)
    return True


class _Directory:
    """`router_pool.ReplicaDirectory` of one router in this process."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def replica_ids(self) -> list[str]:
        return ["router"]

    def handle(self, _replica_id: str) -> Any:
        return self._router
