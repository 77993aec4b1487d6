"""Draining: requests in progress finish, and new ones are refused."""

import asyncio

import pytest

import cluster.engine.router
from specray.server.routing.router_pool import DRAINING, RouterPool
from tests.support.scripted_server import Serve, Server
from tests.unit.server.routing.test_failover import BODY, SLOW, stream, text_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.engine.router, "HEARTBEAT_INTERVAL_S", 0.05)


async def is_refused(server: Server) -> bool:
    """Whether a new request gets 503 with Retry-After."""
    reply = await server.http.post("/v1/completions", json=BODY)
    assert reply.status_code in (200, 503)
    if reply.status_code == 200:
        return False
    assert (reply.json()["error"]["message"], reply.headers["retry-after"]) == (DRAINING, "2")
    return True


def test_streams_finish_and_new_requests_get_503(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW) as server:
            whole = text_of(await stream(server, BODY))
            begun = asyncio.create_task(stream(server, BODY))
            await server.until(lambda: server.router._connections.num_requests > 0)
            assert await server.router_pool.drain() == 1
            assert await is_refused(server)
            for probe in ("/readyz", "/health"):
                assert (await server.http.get(probe)).status_code == 503
            assert (await server.http.get("/livez")).status_code == 200
            assert text_of(await begun) == whole
            await server.until(lambda: server.router._connections.num_requests == 0)
            assert await server.router_pool.drain() == 0

    asyncio.run(scenario())


def test_routers_notify_every_ingress_of_the_drain(serve: Serve) -> None:
    """The drain is requested at one ingress; another one refuses requests, too."""

    async def scenario() -> None:
        async with serve(num_replicas=2) as server:
            other = RouterPool(server, server.router_pool._config)
            other.start()
            await server.until(lambda: other.info is not None and len(other.rank_nodes) == 2)
            assert not await is_refused(server)
            await other.drain()
            await server.until(lambda: server.router_pool.is_draining)
            assert await is_refused(server)
            for replica in server.replicas:
                replica.kill()
            await asyncio.sleep(0.1)
            assert server.router_pool.is_draining  # although no router is left
            await other.close()

    asyncio.run(scenario())


def test_a_stream_that_loses_its_engine_while_draining_continues_on_another_engine(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=2) as server:
            whole = text_of(await stream(server, BODY))
            begun = asyncio.create_task(stream(server, BODY))
            await server.until(lambda: any(r.router._connections.num_requests for r in server.replicas))
            await server.router_pool.drain()
            next(r for r in server.replicas if r.router._connections.num_requests).kill()
            assert text_of(await begun) == whole

    asyncio.run(scenario())


def test_a_router_that_stops_ends_its_ranks_and_reports_no_failure(serve: Serve) -> None:
    """Ranks that outlive their router return from their task while Ray ends them, which it reports as its own bug."""

    async def scenario() -> None:
        async with serve() as server:
            assert (await server.http.post("/v1/completions", json=BODY)).status_code == 200
            await cluster.engine.router.Router.__del__(server.router)
            assert server.ranks.is_stopped
            assert not server.router._engine._thread.is_alive()
            server.router._deliver([], server.router._engine.error)
            await asyncio.sleep(cluster.engine.router.LAST_OUTPUT_S + 0.1)
            assert server.exit_statuses == []

    asyncio.run(scenario())
