"""Overload and client disconnects, over real sockets and scripted ranks."""

import asyncio
import json
import os
import random
import re
from collections import Counter

import pytest

from cluster.engine.metrics import MAX_S, Backoff
from specray.bench.exchange import Exchange, exchange, request_bytes
from specray.bench.ledger import Outcome
from specray.bench.load_command import table
from specray.bench.open_loop import Load, idle_after, run
from specray.engine.stats import EngineStats
from specray.outputs import FinishReason
from tests.support.scripted_server import Serve, Server, listening

BODY = {"prompt": "hi", "max_tokens": 30, "ignore_eos": True}
LEASE_S = 2.0  # an ingress reports refused requests to a router every LEASE_S / 4


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def assert_all_free(server: Server) -> None:
    """All KV blocks and request slots are free, and no request is registered anywhere."""
    scheduler = server.router._engine._engine.scheduler
    pool, num_slots = scheduler.pool, server.router._config.max_running_requests
    await server.until(lambda: len(scheduler.slots.free) == num_slots and not scheduler.waiting)
    await server.until(lambda: pool.num_free + scheduler.cache.num_idle == pool.num_usable)
    await server.until(lambda: server.router._connections.num_requests == 0)
    await server.until(lambda: not any(client._listeners for client in server.router_pool._clients.values()))


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_disconnect_at_any_byte_leak_nothing(serve: Serve, stream: bool) -> None:
    """Long requests are cut before they end, short ones around their end. A long one takes 5 s."""

    async def scenario() -> None:
        rng = random.Random(stream)
        async with serve(step_s=0.03, max_running_requests=8) as server, listening(server) as url:
            short, long = (
                request_bytes(f"{url}/v1/completions", BODY | {"stream": stream, "max_tokens": n}) for n in (3, 499)
            )
            whole = await exchange(url, short)
            assert (whole.status, whole.is_whole) == (200, True)
            idle = num_descriptors()
            cuts = [(long, rng.randrange(len(long))) for _ in range(50)]
            cuts += [(long, len(long) + stream * rng.randrange(2000)) for _ in range(50)]
            cuts += [(short, len(short) + rng.randrange(250 + len(whole.body))) for _ in range(50)]
            rng.shuffle(cuts)
            exchanges: list[Exchange] = []
            for start in range(0, len(cuts), 10):
                some = (exchange(url, request, cut_at=place) for request, place in cuts[start : start + 10])
                exchanges += await asyncio.gather(*some)
            await assert_all_free(server)
            ends = server.router._engine._engine.stats.labelled["specray_request_finished_total"]
            assert ends["length"] <= 51, "a long request ran to its end"
            await server.until(lambda: num_descriptors() <= idle)
            kinds = Counter((e.was_cut, e.status) for e in exchanges)
            assert kinds[True, None] > 50, "cut before the status line"
            assert kinds[True, 200] > 5, kinds
            assert (await exchange(url, short)).is_whole

    asyncio.run(scenario())


def test_a_body_that_does_not_arrive_gets_an_error_and_frees_its_connection(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(server={"body_timeout_s": 0.3}) as server, listening(server) as url:
            head, _, body = request_bytes(f"{url}/v1/completions", BODY).partition(b"\r\n\r\n")
            head = head.replace(b"Connection: close", b"Connection: keep-alive")
            chunked = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
            parts = (head, b""), (head, body[:-1]), (chunked, b""), (chunked, b"5\r\nab")
            replies = [exchange(url, start + b"\r\n\r\n" + rest, timeout_s=5.0) for start, rest in parts]
            for reply in await asyncio.gather(*replies):
                assert (reply.status, reply.is_whole, reply.error) == (408, True, "")
                assert json.loads(reply.body)["error"]["code"] == "body_timeout"
                assert 0.3 <= reply.seconds < 3.0

    asyncio.run(scenario())


def test_an_overloaded_server_refuses_the_excess_without_spending_steps_on_it(serve: Serve) -> None:
    """Capacity: 2 concurrent requests of 10 steps of 10 ms, 20 requests/s. Load: 200 requests/s."""

    async def scenario() -> None:
        options = {"max_running_requests": 2, "max_queued_requests": 4, "server": {"lease_s": LEASE_S}}
        async with serve(step_s=0.01, **options) as server, listening(server) as url:
            report = await run(Load(url, 200.0, 1.5, max_tokens=30, prompts=[["hi"]], timeout_s=30.0))
            ledger = report.ledger
            assert not ledger.violations()
            assert ledger.count(Outcome.COMPLETE) + ledger.count(Outcome.REFUSED) == ledger.num_begun
            assert {end.status for end in ledger.of(Outcome.REFUSED)} == {429}
            assert ledger.count(Outcome.REFUSED) > ledger.num_begun / 4
            assert "status 429" in table(report)
            assert await idle_after(url) < 10.0
            await assert_all_free(server)
            generated = server.router._engine.stats()["specray_generation_tokens_total"]
            assert generated == 30 * ledger.count(Outcome.COMPLETE)
            await server.until(lambda: num_refused(server) == ledger.count(Outcome.REFUSED))

    asyncio.run(scenario())


def test_an_ingress_refuses_without_a_call_while_the_queue_is_full(serve: Serve) -> None:
    """The engine still counts the refused requests, and accepts new ones once its queue has space."""

    async def scenario() -> None:
        options = {"max_running_requests": 1, "max_queued_requests": 1, "server": {"lease_s": 4 * LEASE_S}}
        async with serve(step_s=0.02, **options) as server:
            client = next(iter(server.router_pool._clients.values()))
            await server.until(lambda: server.router_pool.since_token_s < 1.0)  # the router's first probe is done
            long = BODY | {"max_tokens": 150}
            under_way = [asyncio.create_task(server.http.post("/v1/completions", json=long)) for _ in range(2)]
            await server.until(lambda: client.refusal is not None, LEASE_S * 0.8)  # before the next regular heartbeat
            server.replicas[0].freeze()  # the router cannot be called
            refused = await server.http.post("/v1/completions", json=BODY)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert "max_queued_requests is 1" in refused.json()["error"]["message"]
            server.replicas[0].thaw()
            assert [(await reply).status_code for reply in under_way] == [200, 200]
            await server.until(lambda: client.refusal is None, LEASE_S * 0.8)
            assert (await server.http.post("/v1/completions", json=BODY)).status_code == 200
            await server.until(lambda: num_refused(server) == 1)

    asyncio.run(scenario())


def num_refused(server: Server) -> object:
    return server.router._engine.stats()["specray_requests_refused_total"]


def test_a_request_that_expires_in_the_queue_never_runs(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, max_running_requests=1) as server:
            first = asyncio.create_task(server.http.post("/v1/completions", json=BODY | {"max_tokens": 300}))
            await server.until(lambda: server.ranks.num_steps > 2)
            late = await server.http.post("/v1/completions", json=BODY | {"timeout": 0.2})
            assert late.status_code == 504
            assert not first.done()
            assert (await first).status_code == 200
            assert len(server.ranks._rows) == 1  # the only request that ever ran
            assert server.ranks.num_steps <= 102
            stats = server.router._engine.stats()["specray_request_queue_time_seconds"]
            assert sum(stats.buckets) == 1  # type: ignore[union-attr]

    asyncio.run(scenario())


def test_the_engine_enforces_the_deadline_when_the_abort_is_lost(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as server:
            client = next(iter(server.router_pool._clients.values()))
            client.forget = lambda *_, **__: None  # type: ignore[method-assign]  # no abort is sent
            body = BODY | {"max_tokens": 400, "timeout": 0.2}
            assert (await server.http.post("/v1/completions", json=body)).status_code == 504
            engine = server.router._engine._engine
            await server.until(lambda: not engine.scheduler.running)
            ends = engine.stats.labelled["specray_request_finished_total"]
            await server.until(lambda: ends["abort"] + ends["length"] == 1)
            assert ends["abort"] == 1

    asyncio.run(scenario())


def test_retry_after_estimates_the_time_to_drain_the_queue() -> None:
    now = 0.0
    stats, backoff = EngineStats(), Backoff(20, lambda: now)
    assert backoff.retry_after_s(stats.snapshot()) == 1
    stats.set("specray_num_requests_waiting", 30)
    backoff.record(stats.snapshot())
    now = 4.2
    assert backoff.retry_after_s(stats.snapshot()) == 5, "no request has finished for so long"
    stats.add_labelled("specray_request_finished_total", FinishReason.STOP, 8)
    stats.add_labelled("specray_request_finished_total", FinishReason.LENGTH, 4)
    now = 6.0
    backoff.record(stats.snapshot())
    assert backoff.retry_after_s(stats.snapshot()) == 15, "30 waiting, 2 finished per second"
    stats.set("specray_num_requests_waiting", 1)
    assert backoff.retry_after_s(stats.snapshot()) == 1
    stats.set("specray_num_requests_waiting", 5000)
    assert backoff.retry_after_s(stats.snapshot()) == MAX_S
