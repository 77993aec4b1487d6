"""A router's connections to its ingresses."""

import asyncio

from cluster.engine.connections import Connections
from specray.server.routing.messages import AGE_TOLERANCE_S, ConnectionEnd, RouterHeartbeat, RouterInfo

INFO = RouterInfo("toy", 512, 257, 1024, 0, [], "float32", True, ())


def test_a_heartbeat_has_the_number_of_requests_of_other_ingresses() -> None:
    async def scenario() -> None:
        connections = Connections(lambda _: None, 1.0)
        streams = {name: connections.stream(name, INFO) for name in ("a", "b", "c")}
        for stream in streams.values():
            assert await anext(stream) == INFO
        connections.add("a", ["1", "2"])
        connections.add("b", ["3"])
        connections.remove(["1"])
        connections.send_heartbeat(RouterHeartbeat(0.0, None, 0.0))
        received = {name: await anext(stream) for name, stream in streams.items()}
        assert {name: heartbeat.num_others for name, heartbeat in received.items()} == {"a": 1, "b": 1, "c": 2}

    asyncio.run(scenario())


def test_later_heartbeats_have_only_what_the_ingress_does_not_assume() -> None:
    """A time since the last token that has grown by the time since the last heartbeat is what it assumes.

    Every second one without changes is left out, unless the ingress has requests.
    """
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        connections = Connections(lambda _: None, 1.0, lambda: now)
        stream = connections.stream("a", INFO)
        assert await anext(stream) == INFO
        for since_token_s, kv_usage, expected in (
            (7.0, 0.5, RouterHeartbeat(0.5, 2.0, 7.0)),
            (7.5, 0.5, None),
            (8.01, 0.5, {}),
            (8.5, 0.5, None),
            (0.1, 0.75, {"since_token_s": 0.1, "kv_usage": 0.75}),
            (0.6, 0.75, None),
        ):
            connections.send_heartbeat(RouterHeartbeat(kv_usage, 2.0, since_token_s))
            if expected is not None:
                assert await anext(stream) == expected
            now += 0.5
        other = connections.stream("b", INFO)
        assert await anext(other) == INFO
        connections.send_heartbeat(RouterHeartbeat(0.75, 2.0, 1.1))
        assert (await anext(stream), await anext(other)) == ({}, RouterHeartbeat(0.75, 2.0, 1.1))
        connections.add("a", ["1"])
        for _ in range(3):
            now += 0.5
            connections.send_heartbeat(RouterHeartbeat(0.75, 2.0, 1.1 + now - 3.0, num_others=0))
        connections.remove(["1"])
        now += 0.5
        connections.send_heartbeat(RouterHeartbeat(0.9, 2.0, 0.0))
        assert [await anext(stream) for _ in range(4)] == [{}, {}, {}, {"since_token_s": 0.0, "kv_usage": 0.9}]

    asyncio.run(scenario())


def test_small_differences_of_heartbeats_do_not_add_up() -> None:
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        connections = Connections(lambda _: None, 1.0, lambda: now)
        stream = connections.stream("a", INFO)
        await anext(stream)
        connections.add("a", ["1"])  # or every second heartbeat would be left out
        assumed = RouterHeartbeat(0.0, None, 0.0)
        connections.send_heartbeat(assumed)
        assert await anext(stream) == assumed
        for number in range(1, 9):
            now += 0.5
            connections.send_heartbeat(RouterHeartbeat(0.0, None, 0.54 * number))
            changes = await anext(stream)
            assert isinstance(changes, dict)
            assumed = assumed.later(0.5)._replace(**changes)
            assert abs(assumed.since_token_s - 0.54 * number) <= AGE_TOLERANCE_S

    asyncio.run(scenario())


def test_a_stall_of_the_router_itself_ends_no_lease() -> None:
    """Renewals that arrived meanwhile are read after it. An ingress that is gone is noticed nevertheless."""
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        aborted: list[str] = []
        connections = Connections(aborted.extend, 1.0, lambda: now)
        stream = connections.stream("a", INFO)
        assert await anext(stream) == INFO
        connections.add("a", ["1"])
        for _ in range(3):
            now += 60.0  # nothing runs
            connections.expire(10.0)
            assert "a" in connections
            connections.renew("a")
            now += 1.0
            connections.expire(10.0)
        for _ in range(10):
            now += 1.0
            connections.expire(10.0)
        assert aborted == ["1"]
        assert await anext(stream) == ConnectionEnd("the connection's lease expired", [])

    asyncio.run(scenario())
