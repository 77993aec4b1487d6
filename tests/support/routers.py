"""A Router that runs without Serve."""

from collections.abc import Callable
from typing import Any

from cluster.config import AppConfig
from cluster.engine.router import Router


class LocalRouter(Router):
    """Serve awaits `Router.__del__`. The interpreter calls it too, and would warn that nobody awaits the coroutine."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def start_router(config: AppConfig, exit_process: Callable[[int], Any]) -> Router:
    router = object.__new__(LocalRouter)
    await Router.__init__(router, config, exit_process=exit_process)  # type: ignore[misc]
    return router
