"""`python -m benchmarks.streams`: CPU and memory of an idle ingress, and how soon it detects lost engines.

Ray Serve, its directory, streams, heartbeats, leases and one ingress are real; the ingress is configured as one of
several. Engines are stubs in one process: a router's connections and heartbeats without an engine.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, NamedTuple

import psutil
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from benchmarks import results
from benchmarks.figure import MEASURED
from cluster.app import ADDRESSED_ROUTER, HOST_ENVIRONMENT, ROUTER_MAX_CALLS
from cluster.cli.serve import RAY_OPTIONS
from cluster.config import AppConfig
from cluster.engine.connections import Connections
from cluster.ingress import replicas
from specray.bench import machine
from specray.cli.arguments import positive
from specray.server.routing.client import RouterHandle
from specray.server.routing.messages import Item, RouterHeartbeat, RouterInfo
from specray.server.routing.router_pool import RouterPool
from specray.server.routing.subset import IngressPlace, engines_of
from specray.tables import format_table

TABLE = "Ingresses without traffic, {} ingresses x {} engines"
HEARTBEAT_INTERVAL_S = 0.5  # as a router's
INFO = RouterInfo("stub", 4096, 32_000, 65_536, 7, [2], "float32", True, ("127.0.0.1",))


class Idle(NamedTuple):
    """One ingress process while nobody asks."""

    num_streams: int
    cpu_share: float  # of a core
    memory_mib: float  # of its own


class StubRouters:
    """The parts of several `cluster.engine.router.Router` that ingresses talk to while there are no requests."""

    async def __init__(self, count: int) -> None:  # type: ignore[misc]  # Serve awaits it
        self._connections = [Connections(lambda _: None, 1.0) for _ in range(count)]
        self._beating = asyncio.create_task(self._beat())

    async def outputs(self, connection_id: str, to: str, engine: int) -> AsyncIterator[Item]:
        del to  # the replica, read by the request router of who calls; so in all calls
        async for item in self._connections[engine].stream(connection_id, INFO):
            yield item

    async def renew(self, connection_id: str, num_refused: int, num_poison: int, to: str, engine: int) -> bool:
        del num_refused, num_poison, to
        return self._connections[engine].renew(connection_id)

    async def stats(self) -> dict[str, float]:
        return {}

    async def process_id(self, to: str) -> int:
        del to
        return os.getpid()

    async def _beat(self) -> None:
        start = time.monotonic()
        while True:
            since_token_s = (time.monotonic() - start) % 2.0  # an idle engine generates a token for a probe
            for connections in self._connections:
                connections.send_heartbeat(RouterHeartbeat(0.0, 3.9, since_token_s))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)


class StubDirectory(replicas.ServeReplicaDirectory):
    """Lists the engines `engine_ids` while a replica runs, whose stubs they are in this order."""

    def __init__(self, handle: DeploymentHandle[Any], engine_ids: list[str], place: IngressPlace) -> None:
        super().__init__(handle)
        self._engine_ids, self._place = engine_ids, place

    def place(self) -> IngressPlace:
        return self._place

    def replica_ids(self) -> Collection[str]:
        return self._engine_ids if super().replica_ids() else []

    def process(self) -> str:
        """The replica ID of the stubs' process."""
        return next(iter(super().replica_ids()))

    def handle(self, replica_id: str) -> RouterHandle:
        handle = super().handle(self.process())
        assert isinstance(handle, replicas.ServeRouterHandle)
        handle._to |= {"engine": self._engine_ids.index(replica_id)}
        return handle


class StubIngress:
    """The part of an ingress that talks to routers."""

    def __init__(self, config: AppConfig, router: DeploymentHandle[Any], ids: list[str], num_ingresses: int) -> None:
        self._router = router
        self._directory = StubDirectory(router, ids, IngressPlace(0, num_ingresses))
        self._pool = RouterPool(self._directory, config)
        self._pool.start()

    async def num_streams(self) -> int:
        return len(self._pool.rank_nodes)

    async def idle(self, seconds: float) -> Idle:
        """Measure this process for so long."""
        process = psutil.Process()
        start, before = time.monotonic(), sum(process.cpu_times()[:2])
        await asyncio.sleep(seconds)
        spent_s = sum(process.cpu_times()[:2]) - before
        memory_mib = process.memory_full_info().uss / 2**20
        return Idle(len(self._pool.rank_nodes), spent_s / (time.monotonic() - start), memory_mib)

    async def disconnect(self) -> None:
        """Close all streams for good."""
        await self._pool.close()

    async def time_to_notice(self, sign: int) -> float:
        """Seconds from a signal to the process of the engines until this ingress has no stream."""
        process_id: int = await self._router.process_id.remote(to=self._directory.process())
        start = time.monotonic()
        os.kill(process_id, sign)
        while self._pool.rank_nodes and time.monotonic() < start + 30.0:
            await asyncio.sleep(0.01)
        noticed_s = time.monotonic() - start
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)  # Serve would wait for a frozen one
        return noticed_s


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    os.environ.update(RAY_OPTIONS | {"RAY_USAGE_STATS_ENABLED": "0"})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(results.ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        app = _application(_config(options), options.ingresses, _engine_ids(options))
        handle = serve.run(app, name="streams", route_prefix=None)
        figures = _measure(handle, options)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    rows = [[figure.row, figure.form.format(figure.value)] for figure in figures]
    print(f"{format_table((figures[0].table, 'measured'), rows)}\n\n{machine.one_line()}")
    if options.save:
        print(f"saved in {results.save(None, figures)}")
    return 0


def _config(options: argparse.Namespace) -> AppConfig:
    routing = {} if options.engines_per_ingress is None else {"engines_per_ingress": options.engines_per_ingress}
    return AppConfig.model_validate({"model": "stub", "routing": routing})


def _engine_ids(options: argparse.Namespace) -> list[str]:
    """IDs with which the ingress has as many streams as the mean of all, or nearly: chance decides with others."""

    def distance(first: int) -> float:
        streams = _num_streams(options, _numbers(first, options.engines))
        return abs(streams[0] - sum(streams) / len(streams))

    return _numbers(min(range(64), key=distance), options.engines)


def _numbers(first: int, count: int) -> list[str]:
    return [str(number) for number in range(first, first + count)]


def _num_streams(options: argparse.Namespace, engine_ids: list[str]) -> list[int]:
    """Streams of each ingress."""
    usual = _config(options).routing.engines_per_ingress
    places = [IngressPlace(rank, options.ingresses) for rank in range(options.ingresses)]
    return [len(engines_of(place, engine_ids, usual)) for place in places]


def _application(config: AppConfig, num_ingresses: int, engine_ids: list[str]) -> serve.Application:
    def deployment(cls: type) -> serve.Deployment:
        return serve.deployment(
            name=cls.__name__,
            max_ongoing_requests=ROUTER_MAX_CALLS,
            ray_actor_options={"num_cpus": 0.01, "runtime_env": {"env_vars": HOST_ENVIRONMENT}},
            graceful_shutdown_timeout_s=0.1,
        )(cls)

    router = RequestRouterConfig(
        request_router_class=ADDRESSED_ROUTER, request_router_kwargs={"deployment": StubRouters.__name__}
    )
    routers = deployment(StubRouters).options(request_router_config=router).bind(len(engine_ids))
    return deployment(StubIngress).bind(config, routers, engine_ids, num_ingresses)


def _measure(handle: DeploymentHandle[Any], options: argparse.Namespace) -> list[results.Result]:
    """The figures. The streams at rest come first: an ingress that loses all its engines connects to others."""
    num_streams = _wait_for_streams(handle)
    idle = Idle(*handle.idle.remote(options.seconds).result(timeout_s=600.0))
    noticed_s = []
    for sign in (signal.SIGKILL, signal.SIGSTOP):
        _wait_for_streams(handle)
        noticed_s.append(handle.time_to_notice.remote(int(sign)).result(timeout_s=60.0))
    handle.disconnect.remote().result(timeout_s=60.0)
    without = Idle(*handle.idle.remote(options.seconds).result(timeout_s=600.0))
    found = [
        ("streams of all ingresses", sum(_num_streams(options, _engine_ids(options))), "{:.0f}", 128.0),
        ("streams of this ingress", float(num_streams), "{:.0f}", None),
        ("CPU, of a core", idle.cpu_share, "{:.1%}", 0.03),
        ("CPU without streams", without.cpu_share, "{:.1%}", None),
        ("memory, MiB", idle.memory_mib, "{:.0f}", None),
        ("seconds until killed engines are noticed", noticed_s[0], "{:.2f}", None),
        ("seconds until frozen engines are noticed", noticed_s[1], "{:.2f}", None),
    ]
    table, commit = TABLE.format(options.ingresses, options.engines), results.commit_here()
    return [
        results.Result(
            table=table,
            row=row,
            column=options.column,
            value=value,
            form=form,
            goal=goal,
            at_most=goal is not None,
            commit=commit,
        )
        for row, value, form, goal in found
    ]


def _wait_for_streams(handle: DeploymentHandle[Any]) -> int:
    """The number of streams, once there are some and it has stayed the same for seconds."""
    give_up, last, num_same = time.monotonic() + 300.0, 0, 0
    while num_same < 5:
        assert time.monotonic() < give_up, "the ingress is not connected"
        time.sleep(1.0)
        number: int = handle.num_streams.remote().result(timeout_s=60.0)
        num_same, last = num_same + 1 if number and number == last else 0, number
    return last


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.streams", description=__doc__.partition(". ")[0])
    parser.add_argument("--ingresses", type=positive, default=8, help="replicas of the ingress (default: %(default)s)")
    parser.add_argument("--engines", type=positive, default=64, help="stubs of engines (default: %(default)s)")
    parser.add_argument(
        "--engines-per-ingress", type=positive, help="see routing.engines_per_ingress (default: that of servers)"
    )
    parser.add_argument("--seconds", type=positive, default=30, help="of one measurement (default: %(default)s)")
    parser.add_argument("--column", default=MEASURED, help="column of the results (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="save the figures in benchmarks/results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
