"""A request that ends engines ends two of them and then with an error; no other request is lost, or blamed for it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import cluster.engine.router
import specray.server.routing.client
from specray.engine.engine_request import PROBATION_STEPS
from specray.errors import EngineDeadError
from tests.support.scripted_server import FATAL, Replica, Serve, Server
from tests.unit.server.routing.test_failover import BODY, SLOW, repeated, retire, serving, stream, text_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": FATAL}], "max_tokens": 20}
FATAL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY | {"prompt": FATAL},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": FATAL, "max_output_tokens": 20},
    "/v1/messages": CHAT | {"model": "toy"},
    "/generate": {"text": FATAL, "sampling_params": {"max_new_tokens": 20}},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.engine.router, "LAST_OUTPUT_S", 0.05)


@asynccontextmanager
async def restarting(server: Server) -> AsyncIterator[None]:
    """A new engine starts for each that ends, as Serve does it."""

    async def restart() -> None:
        replaced: set[str] = set()
        while True:
            for replica in server.replicas:
                if not replica.runs_on and replica.replica_id not in replaced:
                    replaced.add(replica.replica_id)
                    await server.add_replica()
            await asyncio.sleep(0.02)

    restarts = asyncio.create_task(restart())
    try:
        yield
    finally:
        restarts.cancel()


def num_lost(server: Server) -> int:
    return sum(not replica.runs_on for replica in server.replicas)


async def begun(server: Server, count: int) -> None:
    """Wait until `count` requests have tokens."""
    await server.until(lambda: sum(len(r.router._engine._engine.scheduler.running) for r in server.replicas) >= count)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", FATAL_BODIES)
def test_a_fatal_request_ends_two_engines_and_then_with_an_error(
    serve: Serve, path: str, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "ray.serve")

    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=2) as server, restarting(server):
            others = [asyncio.create_task(stream(server, BODY)) for _ in range(4)]
            await begun(server, 4)
            reply = await server.http.post(path, json=FATAL_BODIES[path] | {"stream": streamed})
            if streamed:
                assert reply.status_code == 200
                assert "2 engines stopped" in reply.text
                assert "[DONE]" not in reply.text
            else:
                assert reply.status_code == 500
                assert "2 engines stopped" in reply.json()["error"]["message"]
                assert reply.headers["x-should-retry"] == "false"
            assert [text_of(events) for events in await asyncio.gather(*others)] == [repeated(120)] * 4
            assert num_lost(server) == 2
            assert (await server.http.post("/v1/completions", json=BODY)).status_code == 200

    asyncio.run(scenario())
    (line,) = [record.getMessage() for record in caplog.records if "gave up" in record.getMessage()]
    assert "2 engines stopped" in line
    assert "rank 0 of the target died" in line


def test_several_fatal_requests_end_while_all_others_complete(serve: Serve) -> None:
    """They come while others are suspected, and in one step with them."""

    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=2) as server, restarting(server):
            others = [asyncio.create_task(stream(server, BODY | {"n": 1 + number % 2})) for number in range(6)]
            await begun(server, 6)
            fatal = []
            for _ in range(3):
                fatal.append(asyncio.create_task(stream(server, BODY | {"prompt": FATAL})))
                await asyncio.sleep(0.1)
                others.append(asyncio.create_task(stream(server, BODY)))
            for events in await asyncio.gather(*fatal):
                assert events[-1]["error"]["code"] == "poison_request"
            assert [text_of(events) for events in await asyncio.gather(*others)] == [repeated(120)] * 9
            assert num_lost(server) <= 6

    asyncio.run(scenario())


def test_ends_that_fatal_requests_have_caused_are_not_counted_for_the_requests_beside_them(serve: Serve) -> None:
    """One request runs beside the first end of each of three fatal ones, which is as many as it may survive."""

    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=1) as server, restarting(server):
            other = asyncio.create_task(stream(server, BODY | {"max_tokens": 400}))
            for number in range(3):
                lost = await serving(server)
                await server.until(lambda: lost.ranks.num_steps > PROBATION_STEPS + 3)  # noqa: B023
                events = await stream(server, BODY | {"prompt": FATAL})
                assert events[-1]["error"]["code"] == "poison_request"
                await server.until(lambda: num_lost(server) == 2 * (number + 1))  # noqa: B023
            assert text_of(await other) == repeated(400)

    asyncio.run(scenario())


def test_a_request_that_waits_in_the_queue_is_not_suspected(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=1, max_running_requests=2) as server, restarting(server):
            first = [asyncio.create_task(stream(server, BODY)) for _ in range(2)]
            await begun(server, 2)
            waiting = [asyncio.create_task(stream(server, BODY)) for _ in range(3)]
            scheduler = server.router._engine._engine.scheduler
            await server.until(lambda: len(scheduler.waiting) == 3)
            server.ranks.broken = "rank 0 of the target died"
            await asyncio.gather(*first, *waiting)
            assert counted(server.replicas[-1], "specray_suspect_requests_total") == 2

    asyncio.run(scenario())


def counted(replica: Replica, name: str) -> object:
    return replica.router._engine.stats()[name]


def test_given_up_requests_are_counted(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=3, server={"lease_s": 1.0}) as server:
            await stream(server, BODY | {"prompt": FATAL})
            await server.until(lambda: num_lost(server) == 2)
            (left,) = [replica for replica in server.replicas if replica.runs_on]
            await server.until(lambda: counted(left, "specray_poison_requests_total") == 1)

    asyncio.run(scenario())


def test_a_request_survives_engines_that_end_after_it_has_shown_that_it_is_not_why(serve: Serve) -> None:
    """It ran beside others each time: the third end is too much."""

    async def scenario(num_deaths: int) -> list[dict[str, Any]]:
        async with serve(**SLOW, num_replicas=1) as server, restarting(server):
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 300}))
            for _ in range(num_deaths):
                lost = await serving(server)
                await server.until(lambda: lost.ranks.num_steps > PROBATION_STEPS + 3)  # noqa: B023
                lost.ranks.broken = "rank 0 of the target was killed"
                await server.until(lambda: not lost.runs_on)  # noqa: B023
            return await request

    assert text_of(asyncio.run(scenario(2))) == repeated(300)
    assert asyncio.run(scenario(3))[-1]["error"]["code"] == "poison_request"


@pytest.mark.parametrize("way", ["stopped", "nodes lost", "lease expired", "silent for a while"])
def test_ends_that_no_request_can_have_caused_are_not_counted(
    serve: Serve, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specray.server.routing.client, "HEARTBEAT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(cluster.engine.router, "HEARTBEAT_INTERVAL_S", 0.1)

    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=1) as server, restarting(server):
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 300}))
            for number in range(5):
                lost = await serving(server)
                if way == "silent for a while":
                    lost.freeze()
                    await server.until(lambda: server.num_connected == 0)
                    lost.thaw()
                    await server.until(lambda: server.num_connected == 1)
                    await server.until(lambda: lost.ranks.num_steps > 3)  # noqa: B023
                    continue
                if way == "lease expired":
                    lost.router._connections.expire(0.0)
                    await asyncio.sleep(0.1)
                    continue
                if way == "stopped":
                    await server.add_replica()
                    await retire(server, lost)
                else:
                    server.nodes_lost.append(f"node-{number}")
                    lost.router._connections.send_info(lost.router._info._replace(node_id=f"node-{number}"))
                    await asyncio.sleep(0.02)
                lost.kill()
                await asyncio.sleep(0.05)
            assert text_of(await request) == repeated(300)

    asyncio.run(scenario())


def test_an_error_of_the_host_between_two_steps_is_blamed_on_the_request_that_it_handles(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=2) as server, restarting(server):

            def break_at(replica: Replica) -> None:
                engine = replica.router._engine._engine
                commit = engine._commit

                def fatal_commit(emitted: Any) -> Any:
                    if FATAL in replica.ranks.tokenizer.decode(emitted.request.token_ids):
                        raise EngineDeadError("a bug")
                    return commit(emitted)

                engine._commit = fatal_commit  # type: ignore[method-assign]

            start = server._start

            async def broken(replica_id: str) -> Replica:
                replica = await start(replica_id)
                break_at(replica)
                return replica

            server._start = broken
            for replica in server.replicas:
                break_at(replica)
            others = [asyncio.create_task(stream(server, BODY)) for _ in range(4)]
            await begun(server, 4)
            events = await stream(server, BODY | {"prompt": FATAL})
            assert events[-1]["error"]["code"] == "poison_request"
            assert [text_of(events) for events in await asyncio.gather(*others)] == [repeated(120)] * 4
            assert num_lost(server) == 2

    asyncio.run(scenario())
