"""Failover: streams continue on another engine without repeated or missing tokens, or end with an error."""

import asyncio
import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest

import cluster.engine.router
import specray.server.routing.client
import specray.server.routing.router_pool
from specray.engine.engine_request import EngineRequest
from specray.server.routing.messages import Refusal
from tests.support.scripted_server import LOOK_S, TEXT, Replica, ReplicaHandle, Serve, Server

BODY = {"prompt": "ab", "max_tokens": 120, "seed": 5}
SLOW = {"step_s": 0.01}


async def stream(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's events, [DONE] left out; it must be there unless the last event is an error."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = await server.http.post("/v1/completions", json=body | options)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.strip().split("\n\n")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert (lines[-1] == "[DONE]") == ("error" not in events[-1])
    return events


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event.get("choices", []) if choice["index"] == index]
    return "".join(choice["text"] for choice in choices)


def repeated(num_bytes: int) -> str:
    return (TEXT.encode() * (num_bytes // len(TEXT) + 1))[:num_bytes].decode(errors="replace")


async def serving(server: Server) -> Any:
    """The replica that works on a request, once one has made some steps."""

    def busy() -> list[Any]:
        return [
            r for r in server.replicas if not r.is_dead and r.router._connections.num_requests and r.ranks.num_steps > 3
        ]

    await server.until(lambda: bool(busy()))
    return busy()[0]


async def retire(server: Server, replica: Replica) -> None:
    """Serve no longer lists a replica, and the ingress knows that."""
    replica.is_stopping = True
    clients = server.router_pool._clients
    await server.until(lambda: replica.replica_id not in clients or clients[replica.replica_id].state.is_draining)


def test_a_request_stays_with_the_only_engine_while_that_sends_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again it would be queued several times there, and requests of others be refused."""
    submits: list[str] = []
    submit = ReplicaHandle.submit

    async def counted(self: ReplicaHandle, connection_id: str, requests: list[EngineRequest]) -> Refusal | None:
        submits.extend(request.request_id for request in requests)
        return await submit(self, connection_id, requests)

    monkeypatch.setattr(ReplicaHandle, "submit", counted)

    async def scenario() -> None:
        async with serve(num_replicas=1) as server:
            await server.until(lambda: server.router_pool.is_connected)
            server.replicas[0].freeze()
            request = asyncio.create_task(server.http.post("/v1/completions", json=BODY))
            await asyncio.sleep(0.8 * specray.server.routing.client.HEARTBEAT_TIMEOUT_S)
            server.replicas[0].thaw()
            assert (await request).status_code == 200
            assert len(submits) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["kill", "freeze"])
def test_a_stream_continues_on_another_engine(serve: Serve, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specray.server.routing.client, "HEARTBEAT_TIMEOUT_S", 1.2)

    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=2) as server:
            request = asyncio.create_task(stream(server, BODY))
            lost = await serving(server)
            getattr(lost, way)()
            events = await request
            lost.thaw()  # its later outputs must be ignored
            await asyncio.sleep(0.1)
            assert text_of(events) == repeated(120)
            usage = events[-1]["usage"]
            assert (usage["completion_tokens"], usage["prompt_tokens"]) == (120, 2)
            assert server.router_pool.num_failovers == 1
            other = next(replica for replica in server.replicas if replica is not lost)
            assert 0 < other.ranks.num_steps < 60  # it did not start over

    asyncio.run(scenario())


def test_a_stall_of_the_ingress_itself_loses_no_engine(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specray.server.routing.client, "HEARTBEAT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(cluster.engine.router, "HEARTBEAT_INTERVAL_S", 0.1)

    async def scenario() -> None:
        async with serve() as server:
            (client,) = server.router_pool._clients.values()
            for _ in range(3):
                time.sleep(1.0)  # stalls the event loop on purpose
                await asyncio.sleep(0.25)
                assert (await server.http.get("/health")).status_code == 200
            assert list(server.router_pool._clients.values()) == [client]
            assert client.info is not None

    asyncio.run(scenario())


def test_a_stall_that_exceeds_the_lease_refuses_and_loses_nothing(serve: Serve) -> None:
    """Router and ingress stall alike where another program takes all cores. Ingresses renew their leases late."""

    async def scenario() -> None:
        options = {"max_running_requests": 1, "max_queued_requests": 1}
        async with serve(**SLOW, **options, server={"lease_s": 1.0, "metrics_interval_s": 0.1}) as server:
            (client,) = server.router_pool._clients.values()
            await server.until(lambda: server.router_pool.since_token_s < 1.0)  # the router's first probe is done
            under_way = [asyncio.create_task(stream(server, BODY | {"max_tokens": 400})) for _ in range(2)]
            await server.until(lambda: client.refusal is not None)
            for _ in range(2):
                time.sleep(1.5)  # stalls the event loop on purpose
                replies = [server.http.post("/v1/completions", json=BODY) for _ in range(4)]
                assert {reply.status_code for reply in await asyncio.gather(*replies)} <= {200, 429}
            assert [text_of(events) for events in await asyncio.gather(*under_way)] == [repeated(400)] * 2
            assert list(server.router_pool._clients.values()) == [client]
            assert server.router_pool.num_failovers == 0

    asyncio.run(scenario())


def test_an_ingress_follows_its_routers_after_an_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serve() as server:
            errors = iter([KeyError("a bug"), ConnectionError("no head node")])
            replica_ids = server.replica_ids

            def failing() -> list[str]:
                for error in errors:
                    raise error
                return replica_ids()

            monkeypatch.setattr(server, "replica_ids", failing)
            await server.add_replica()
            await server.until(lambda: server.num_connected == 2)

    asyncio.run(scenario())


def test_an_engine_lost_during_submit_does_not_duplicate_the_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener is notified of the loss before submit fails; the request must run on one other engine only."""
    asked: list[tuple[str, str]] = []
    submit = ReplicaHandle.submit

    async def submitted(handle: ReplicaHandle, connection_id: str, requests: list[EngineRequest]) -> Refusal | None:
        asked.append((handle._replica.replica_id, requests[0].request_id))
        if len(asked) == 1:
            handle._replica.kill()
            await asyncio.sleep(0.1)
        return await submit(handle, connection_id, requests)

    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=2) as server:
            monkeypatch.setattr(ReplicaHandle, "submit", submitted)
            assert text_of(await stream(server, BODY)) == repeated(120)
            assert server.router_pool.num_failovers == 0
            (lost, first), (other, second) = asked
            assert lost != other
            assert first == second

    asyncio.run(scenario())


def test_streams_continue_when_the_only_engine_restarts(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW) as server:
            requests = [asyncio.create_task(stream(server, BODY | {"n": 2})) for _ in range(3)]
            (await serving(server)).kill()
            await asyncio.sleep(0.5)
            await server.add_replica()
            for events in await asyncio.gather(*requests):
                assert text_of(events, 0) == text_of(events, 1) == repeated(120)
            assert server.router_pool.num_failovers == 6

    asyncio.run(scenario())


def test_without_another_engine_in_time_requests_end_with_an_error(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW, server={"failover_s": 0.3}) as server:
            streamed = asyncio.create_task(stream(server, BODY))
            whole = asyncio.create_task(server.http.post("/v1/completions", json=BODY))
            (await serving(server)).kill()
            assert (await streamed)[-1]["error"]["code"] == "service_unavailable"
            assert (await whole).status_code == 503

    asyncio.run(scenario())


def test_the_timeout_spans_all_attempts(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(**SLOW) as server:
            start = asyncio.get_running_loop().time()
            request = asyncio.create_task(server.http.post("/v1/completions", json=BODY | {"timeout": 0.8}))
            (await serving(server)).kill()
            assert (await request).status_code in (503, 504)
            assert asyncio.get_running_loop().time() - start < 3

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_failover_at_any_token_leaves_the_text_unchanged(
    serve: Serve, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines die anywhere: inside a character, inside a possible stop string, before the first token."""
    monkeypatch.setattr(specray.server.routing.router_pool, "DIRECTORY_CHECK_S", 0.01)
    rng = random.Random(seed)
    bodies = [
        BODY | {"max_tokens": 90, "logprobs": 1},
        BODY | {"max_tokens": 200, "stop": ["so on. The quick"]},
        BODY | {"max_tokens": 90, "min_tokens": 5, "n": 2},
    ]

    async def scenario(num_kills: int) -> list[Any]:
        async with serve(step_s=0.004, num_replicas=2) as server:
            requests = [asyncio.create_task(stream(server, body)) for body in bodies]
            for _ in range(num_kills):
                await asyncio.sleep(rng.uniform(0.0, 0.06))
                await server.add_replica()
                lost = rng.choice([replica for replica in server.replicas if not replica.is_dead])
                await retire(server, lost)  # planned, so no request is suspected
                lost.kill()
            results = await asyncio.gather(*requests)
        return [
            (
                [text_of(events, index) for index in range(2)],
                [
                    choice["finish_reason"]
                    for event in events
                    for choice in event.get("choices", [])
                    if choice["finish_reason"]
                ],
                sum(
                    len((choice.get("logprobs") or {}).get("tokens", []))
                    for e in events
                    for choice in e.get("choices", [])
                ),
                events[-1]["usage"]["completion_tokens"],
            )
            for events in results
        ]

    assert asyncio.run(scenario(4)) == asyncio.run(scenario(0))


def test_a_stopping_engine_finishes_its_requests_and_gets_no_new_ones(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.03, num_replicas=2) as server:
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 300}))
            stopping = await serving(server)
            stopping.is_stopping = True
            await asyncio.sleep(0.3)
            others = await asyncio.gather(*(stream(server, BODY | {"max_tokens": 3}) for _ in range(8)))
            assert all(text_of(events) == repeated(3) for events in others)
            assert stopping.router._connections.num_requests == 1
            assert text_of(await request) == repeated(300)
            assert server.router_pool.num_failovers == 0
            await server.until(lambda: not stopping.router._connections._by_id)  # disconnected, so Serve may stop it

    asyncio.run(scenario())


def test_a_new_version_of_the_last_engine_is_waited_for(serve: Serve) -> None:
    """Serve lists the new replica and stops listing the old one at the same time."""

    async def scenario() -> None:
        async with serve() as server:
            for _ in range(3):
                old = server.replicas[-1]
                new = await server.add_replica()
                new.freeze()  # its connection takes a moment
                old.is_stopping = True
                await asyncio.sleep(1.5 * LOOK_S)  # the ingress knows of both
                asyncio.get_running_loop().call_later(0.3, new.thaw)
                replies = await asyncio.gather(*(server.http.post("/v1/completions", json=BODY) for _ in range(8)))
                assert [reply.status_code for reply in replies] == [200] * 8

    asyncio.run(scenario())


def test_an_engine_that_stops_before_the_ingress_knows_refuses_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are still sent to it, and Serve hands them to an engine that has no connection of this ingress."""
    monkeypatch.setattr(specray.server.routing.router_pool, "DIRECTORY_CHECK_S", 0.3)

    async def scenario() -> None:
        async with serve() as server:
            for _ in range(3):
                old = server.replicas[-1]
                await server.add_replica()
                old.is_stopping = True
                replies = await asyncio.gather(*(server.http.post("/v1/completions", json=BODY) for _ in range(8)))
                assert [reply.status_code for reply in replies] == [200] * 8

    asyncio.run(scenario())


def test_a_new_version_of_the_only_engine_is_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve lists no engine while the new one loads its model, for longer than a connection takes."""
    monkeypatch.setattr(specray.server.routing.router_pool, "OPENING_S", 0.2)

    async def scenario() -> None:
        async with serve(max_queued_requests=8) as server:
            server.replicas[0].is_stopping = True
            await server.until(lambda: server.num_connected == 0)
            waiting = [asyncio.create_task(server.http.post("/v1/completions", json=BODY)) for _ in range(8)]
            await asyncio.sleep(0.5)
            for options in ({}, {"timeout": 0.2}):  # more than a queue may hold
                start = time.monotonic()
                assert (await server.http.post("/v1/completions", json=BODY | options)).status_code == 503
                assert time.monotonic() - start < 5.0  # the others wait for longer
            assert (await server.http.get("/health")).status_code == 503
            await server.add_replica()
            assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200] * 8

    asyncio.run(scenario())


def test_waiting_for_a_new_version_counts_towards_the_timeout(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.03) as server:  # 1.2 s for the text
            server.replicas[0].is_stopping = True
            await server.until(lambda: server.num_connected == 0)
            reply = asyncio.create_task(server.http.post("/v1/completions", json=BODY | {"timeout": 1.8}))
            await asyncio.sleep(1.2)
            await server.add_replica()
            assert (await reply).status_code == 504
            refused = await server.http.post("/v1/completions", json=BODY | {"timeout": 0.01})
            assert refused.status_code == 504

    asyncio.run(scenario())


def test_an_ingress_that_has_just_started_refuses_nothing(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(connect=False) as server:
            server.router_pool.start()
            assert (await server.http.post("/v1/completions", json=BODY)).status_code == 200

    asyncio.run(scenario())


def test_without_any_engine_requests_are_refused_after_a_moment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specray.server.routing.router_pool, "OPENING_S", 0.4)

    async def scenario() -> None:
        async with serve(connect=False) as server:
            server.replicas[0].freeze()
            server.router_pool.start()
            for _ in range(2):
                start = time.monotonic()
                assert (await server.http.post("/v1/completions", json=BODY)).status_code == 503
                assert time.monotonic() - start < 2.9  # less than the default

    asyncio.run(scenario())


def test_an_ingress_without_requests_renews_its_leases_half_as_often(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each renewal is a call of Serve, which is most of what an idle ingress does."""
    renewed: list[float] = []
    renew = ReplicaHandle.renew

    async def recorded(handle: ReplicaHandle, *arguments: Any) -> bool:
        renewed.append(time.monotonic())
        return await renew(handle, *arguments)

    async def scenario() -> None:
        async with serve(step_s=0.01, server={"lease_s": 1.0}) as server:
            await server.until(lambda: len(renewed) == 4)
            idle = [later - earlier for earlier, later in pairwise(renewed)]
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 400}))
            await server.until(lambda: len(renewed) == 8)
            busy = [later - earlier for earlier, later in pairwise(renewed[5:])]
            await request
            assert min(idle) >= 0.45
            assert min(busy) < 0.45

    monkeypatch.setattr(ReplicaHandle, "renew", recorded)
    asyncio.run(scenario())


def test_leases_do_not_expire_while_an_engine_stops(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve then delivers neither lease renewals nor health checks to it; only open streams remain."""
    monkeypatch.setattr(cluster.engine.router, "HEALTH_CHECK_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with serve(step_s=0.03, server={"lease_s": 1.0, "metrics_interval_s": 0.1}) as server:
            asking = asyncio.create_task(ask(server))
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 300}))
            stopping = await serving(server)
            stopping.is_stopping = True
            asking.cancel()
            assert text_of(await request) == repeated(300)

    async def ask(server: Server) -> None:
        while True:
            await server.router.check_health()
            await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_requests_are_routed_to_the_engine_with_their_prefix(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(num_replicas=3, routing={"prefix_block_size": 8}) as server:
            prompts = [f"{number:2} {'x' * 40}" for number in range(12)]
            for _ in range(2):
                for prompt in prompts:
                    await server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
            hits = [r.router._engine.stats()["specray_prefix_cache_hits_total"] for r in server.replicas]
            asked = [r.router._engine.stats()["specray_prefix_cache_queries_total"] for r in server.replicas]
            assert sum(hits) > 0.3 * sum(
                asked
            )  # at best 32 of 43 tokens on every second request; a third of that if routed at random
            assert sum(count > 0 for count in asked) > 1

    asyncio.run(scenario())


def test_the_load_of_an_engine_is_known_between_heartbeats(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.engine.router, "HEARTBEAT_INTERVAL_S", 60.0)

    async def scenario() -> None:
        async with serve(**SLOW, num_replicas=2) as server:
            request = asyncio.create_task(stream(server, BODY | {"max_tokens": 300}))
            busy = await serving(server)
            for _ in range(8):
                await server.http.post("/v1/completions", json=BODY | {"max_tokens": 3})
            assert not request.done()
            assert busy.router._engine.stats()["specray_prompt_tokens_total"] == 2  # "ab", once
            assert text_of(await request) == repeated(300)

    asyncio.run(scenario())
