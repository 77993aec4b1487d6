"""A server in this process without Ray: the engine, the router and the HTTP application are the real ones."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import uvicorn
from fastapi import FastAPI

import cluster.engine.router
from cluster.config import AppConfig
from cluster.engine.router import Router
from specray.engine.engine import Engine
from specray.models.files import resolve_model
from specray.models.tokenizer import load_tokenizer
from specray.server.app import create_app
from specray.server.routing.router_pool import RouterPool
from specray.server.routing.subset import IngressPlace
from specray.server.service import Service
from specray.server.tokenization import Tokenization
from specray.worker.local import LocalExecutor
from tests.support.processes import TIMEOUT_S
from tests.support.routers import start_router

START_TIMEOUT_S = 120.0  # loading a model


class LocalRanks(LocalExecutor):
    """A `RayExecutor` without Ray. It drafts itself, also where an actor would."""

    rank_nodes = ("127.0.0.1",)
    mps = "off"
    drafter_absence = ""

    def failure(self) -> str | None:
        return None


class LocalServer(NamedTuple):
    app: FastAPI
    router: Router
    router_pool: RouterPool
    exits: list[int]  # statuses with which the router's process would have ended


@asynccontextmanager
async def local_server(config: AppConfig) -> AsyncIterator[LocalServer]:
    """A server in the running event loop."""
    folder = resolve_model(config.model, config.revision, config.load_format, progress=False)
    tokenizer = load_tokenizer(folder)
    ranks = LocalRanks(config.engine)
    exits: list[int] = []

    def start_engine(_: AppConfig) -> tuple[Any, Engine]:
        return ranks, Engine(config.engine, ranks, tokenizer.backend_tokenizer)

    with mock.patch.object(cluster.engine.router, "_start_engine", start_engine):
        router = await start_router(config, exits.append)
    router_pool = RouterPool(_Directory(router), config)
    service = Service(config, router_pool, lambda length: Tokenization(tokenizer, length))
    router_pool.start()
    try:
        assert await until(lambda: router_pool.info is not None)
        yield LocalServer(create_app(service), router, router_pool, exits)
    finally:
        await service.close()
        await router_pool.close()
        for task in router._background:
            task.cancel()
        await asyncio.to_thread(router._engine.close)


@contextmanager
def served(start: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """Serve the application of `start()`, an async context manager, on a socket, in a thread. Yields URL and server."""
    is_ready, found, failures = threading.Event(), [], []
    front: uvicorn.Server | None = None

    async def main() -> None:
        nonlocal front
        async with start() as server:
            front = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="critical"))
            serving = asyncio.create_task(front.serve())
            assert await until(lambda: front is not None and front.started)
            port = front.servers[0].sockets[0].getsockname()[1]
            found.append((f"http://127.0.0.1:{port}", server))
            is_ready.set()
            await serving

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            is_ready.set()

    thread = threading.Thread(target=run, name="served", daemon=True)
    thread.start()
    assert is_ready.wait(START_TIMEOUT_S), f"the server did not start within {START_TIMEOUT_S:g} s"
    if not found:
        raise RuntimeError("the server did not start") from (failures or [None])[0]
    try:
        yield found[0]
    finally:
        assert front is not None
        front.should_exit = True
        thread.join()


async def until(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> bool:
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

    def place(self) -> IngressPlace:
        return IngressPlace()

    def subscribe(self, changed: Callable[[], object]) -> None:
        """The list never changes."""
