"""Errors in the router itself end the engine with their reason; no part of it ends alone."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster.engine.router
from cluster.config import AppConfig
from cluster.engine.connections import Connections
from cluster.engine.router import Router
from specray.errors import ConfigError
from tests.support.scripted_server import Serve
from tests.unit.server.routing.test_failover import BODY, SLOW, serving, stream

QUICK: dict[str, Any] = {"server": {"failover_s": 0.2, "metrics_interval_s": 0.1}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.engine.router, "LAST_OUTPUT_S", 0.05)
    monkeypatch.setattr(cluster.engine.router, "HEARTBEAT_INTERVAL_S", 0.05)


@pytest.mark.parametrize("part", ["maintenance", "heartbeats", "delivery"])
def test_an_error_in_the_routers_own_work_ends_the_engine(
    serve: Serve, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    async def scenario() -> None:
        async with serve(**SLOW, **QUICK) as server:
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 400}))
            await serving(server)
            if part == "maintenance":
                server.ranks.failure = fail  # type: ignore[assignment]
            elif part == "heartbeats":
                monkeypatch.setattr(server.router, "_send_heartbeat", fail)
            else:
                monkeypatch.setattr(Connections, "deliver", fail)
            assert (await request)[-1]["error"]["code"] == "service_unavailable"
            await server.until(lambda: server.exit_statuses == [1])
            assert server.router._error == "the router failed: KeyError: 'a bug'"

    asyncio.run(scenario())


def test_a_step_that_hangs_in_the_host_ends_the_engine(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks run, so the executor waits for nothing."""
    monkeypatch.setattr(cluster.engine.router, "HOST_STEP_S", 0.2)

    async def scenario() -> None:
        options = {"server": QUICK["server"] | {"step_timeout_s": 1.0}}
        async with serve(**SLOW, **options) as server:
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 400}))
            await serving(server)
            server.router._engine._engine._commit = lambda _: time.sleep(4.0)  # type: ignore[method-assign,assignment]
            assert (await request)[-1]["error"]["code"] == "service_unavailable"
            assert "a step did not end within 1.2 s" in str(server.router._error)

    asyncio.run(scenario())


def test_a_router_whose_engine_does_not_start_stops_without_an_error(tmp_path: Path) -> None:
    router: Any = SimpleNamespace()

    async def start_and_stop() -> None:
        with pytest.raises(ConfigError):
            await Router.__init__(router, AppConfig(model=str(tmp_path)))  # type: ignore[misc]
        await Router.__del__(router)

    asyncio.run(start_and_stop())
