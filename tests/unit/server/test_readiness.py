"""/readyz: whether an engine generated a token recently. /livez: whether the ingress answers."""

import asyncio
from typing import Any

import pytest

import cluster.engine.router
import specray.server.operations
from specray.step import RequestResult
from tests.support.processes import TIMEOUT_S
from tests.support.scripted_server import Serve, Server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.engine.router, "HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(cluster.engine.router, "PROBE_AFTER_S", 0.2)
    monkeypatch.setattr(specray.server.operations, "MAX_TOKEN_AGE_S", 1.0)


async def status(server: Server, path: str = "/readyz") -> int:
    return (await server.http.get(path)).status_code


async def until_status(server: Server, wanted: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await status(server) != wanted:
            await asyncio.sleep(0.02)


def break_ranks(server: Server) -> None:
    server.ranks.broken = "a rank died"


def hang(server: Server) -> None:
    server.ranks.step_s = 3.0


def freeze(server: Server) -> None:
    server.replicas[0].freeze()


def return_nan(server: Server) -> None:
    def run(slot: int, *_: Any) -> RequestResult:
        return RequestResult(slot, [], 0, None, "not a number")

    server.ranks._run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [break_ranks, hang, freeze, return_nan])
def test_an_engine_that_generates_no_tokens_is_not_ready(serve: Serve, fault: Any) -> None:
    async def scenario() -> None:
        async with serve(connect=False) as server:
            assert await status(server) == 503
            server.router_pool.start()
            await until_status(server, 200)
            await asyncio.sleep(1.5)
            await until_status(server, 200)  # idle: a probe on a busy machine may take longer than MAX_TOKEN_AGE_S
            fault(server)
            await until_status(server, 503)
            assert await status(server, "/livez") == 200
            server.ranks.step_s = 0.0

    asyncio.run(scenario())


def test_an_engine_without_free_blocks_is_ready_while_it_generates(serve: Serve) -> None:
    """No probe can be scheduled; the running requests show that the engine works."""

    async def scenario() -> None:
        # Three requests, and the probe that a slow machine still computes when they arrive.
        options = {"max_running_requests": 2, "max_queued_requests": 2, "disable_radix_cache": True}
        async with serve(step_s=0.3, **options) as server:
            await until_status(server, 200)
            await server.until(lambda: bool(server.router._probes))
            server.ranks.step_s = 0.01
            body = {"prompt": "x" * 200, "max_tokens": 300, "ignore_eos": True}
            ask = [asyncio.create_task(server.http.post("/v1/completions", json=body | {"seed": i})) for i in range(3)]
            scheduler = server.router._engine._engine.scheduler
            await server.until(lambda: scheduler.pool.num_free < 3 and bool(scheduler.waiting))
            server.ranks.step_s = 0.2  # a request ends a few tokens later
            await asyncio.sleep(1.0)  # from now on no token of a probe is recent
            later = [await status(server)]
            while not ask[0].done():
                later.append(await status(server))
                await asyncio.sleep(0.02)
            # On a busy machine a step may take longer than MAX_TOKEN_AGE_S, but not each.
            assert later.count(200) > 1
            assert {reply.status_code for reply in await asyncio.gather(*ask)} == {200}

    asyncio.run(scenario())


def test_probes_are_not_counted_in_metrics(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as server:
            await until_status(server, 200)
            stats = server.router._engine.stats()
            assert stats["specray_steps_total"] != 0
            for name in (
                "specray_prompt_tokens_total",
                "specray_generation_tokens_total",
                "specray_verify_steps_total",
            ):
                assert stats[name] == 0
            assert set(stats["specray_request_finished_total"].values()) == {0}  # type: ignore[union-attr]

    asyncio.run(scenario())
