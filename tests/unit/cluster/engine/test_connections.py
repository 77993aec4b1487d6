"""A router's connections to its ingresses."""

import asyncio
import time

from cluster.engine.connections import Connections
from cluster.messages import RouterHeartbeat, RouterInfo

INFO = RouterInfo("toy", 512, 257, 1024, 0, [], "float32", True, ())


def test_a_heartbeat_has_the_number_of_requests_of_other_ingresses() -> None:
    async def scenario() -> None:
        connections = Connections(lambda _: None, time.monotonic)
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
