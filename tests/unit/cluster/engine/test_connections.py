"""A router's connections to its ingresses."""

import asyncio

from cluster.engine.connections import Connections
from specray.server.routing.messages import ConnectionEnd, RouterHeartbeat, RouterInfo

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
        connections.broadcast(RouterHeartbeat(0.0, None, 0.0))
        received = {name: await anext(stream) for name, stream in streams.items()}
        assert {name: heartbeat.num_others for name, heartbeat in received.items()} == {"a": 1, "b": 1, "c": 2}

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
