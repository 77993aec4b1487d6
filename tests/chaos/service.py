"""What is broken: a cluster of two Ray nodes with an engine on each, and what it says of itself.

Not here: how it is broken (`faults`).
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.cluster_utils import Cluster

from cluster.app import build
from cluster.config import AppConfig
from specray.local_server import free_port

APP = "chaos"
NUM_ENGINES = 2
ENGINE_CPUS = 0.8  # of a node's single one: a second engine does not fit, an ingress does
BUSY = ("specray_num_requests_running", "specray_num_requests_waiting", "specray_kv_cache_usage_perc")
ROOT = Path(__file__).parents[2]


class Service:
    """A running application; `cluster` is Ray's, whose first node is the head."""

    def __init__(self, cluster: Any, config: AppConfig, port: int) -> None:
        self.cluster = cluster
        self.config = config
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, config: AppConfig) -> None:
        """Start the application, or replace it replica by replica; returns when that is done."""
        serve.run(build(config), name=APP, route_prefix="/")
        self.config = config

    async def engines(self) -> list[str]:
        """Replicas that answer and can make tokens."""
        samples = await self._samples()
        return sorted({replica for name, replica, _ in samples if name == "specray_steps_total"})

    async def is_whole(self) -> bool:
        """Every engine serves, and the front says that it is ready."""
        return len(await self.engines()) == NUM_ENGINES and await self._status("/readyz") == 200

    async def is_idle(self) -> bool:
        """No engine runs, queues or holds anything."""
        samples = await self._samples()
        return bool(samples) and not any(value for name, _, value in samples if name in BUSY)

    async def total(self, name: str) -> float:
        """A counter over all replicas there are now."""
        return sum(value for sample, _, value in await self._samples() if sample == name)

    async def _samples(self) -> list[tuple[str, str, float]]:
        """(name, replica, value)"""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as client:
                reply = await client.get("/metrics")
        except httpx.TransportError:
            return []
        if reply.status_code != 200:
            return []
        families = text_string_to_metric_families(reply.text)
        return [(s.name, s.labels.get("replica", ""), s.value) for family in families for s in family.samples]

    async def _status(self, path: str) -> int:
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as client:
                return (await client.get(path)).status_code
        except httpx.TransportError:
            return 0


@contextmanager
def started(config: AppConfig) -> Iterator[Service]:
    """The service over two nodes of one CPU each; nothing of it is left afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # workers import this checkout
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        service = Service(cluster, config, port)
        service.deploy(config)
        yield service
    finally:
        _end(cluster)


NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


def _end(cluster: Any) -> None:
    """Ask first; a cluster without its GCS does not answer, and is ended anyway."""
    asking = threading.Thread(target=_shut_down, daemon=True)
    asking.start()
    asking.join(20.0)
    cluster.shutdown()


def _shut_down() -> None:
    serve.shutdown()
    ray.shutdown()
