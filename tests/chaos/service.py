"""The service under test: a cluster of two Ray nodes with an engine on each, and its metrics."""

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.cluster_utils import Cluster

from cluster.app import build
from cluster.cli.serve import RAY_OPTIONS
from cluster.config import AppConfig
from specray.cli.local_server import free_port

APP = "chaos"
ENGINE_CPUS = 0.8  # of a node's single CPU: no second engine fits, but an ingress does
BUSY = ("specray_num_requests_running", "specray_num_requests_waiting", "specray_kv_cache_usage_perc")
# Calls of actors and the items of their streams, between ingress and router.
LOST_CALLS = (
    "CoreWorkerService.grpc_client.PushTask",
    "CoreWorkerService.grpc_client.ReportGeneratorItemReturns",
)
LOST_PERCENT = 2
STATUS_TIMEOUT_S = 10.0
ROOT = Path(__file__).parents[2]
INJECTION = Path(__file__).parent / "injection"


class Setting(StrEnum):
    """Kind of cluster."""

    STORED = "the GCS stores its state in a file"
    VOLATILE = "the GCS does not store its state"
    LOSSY = "calls between processes, and their replies, get lost"


class Service:
    """A running application on Ray's `cluster`, whose first node is the head; it stores files in `folder`."""

    def __init__(self, config: AppConfig, setting: Setting, folder: Path) -> None:
        self.cluster: Any = None
        self.config = config
        self._ray_config = ray_config(setting, folder)
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start cluster and application. Ray requires the main thread."""
        head = NODE | {"include_dashboard": False, "_system_config": self._ray_config}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.cluster.add_node(**NODE)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        serve.start(http_options={"host": "127.0.0.1", "port": self._port, "location": "HeadOnly"})
        self.deploy(self.config)

    def end(self, *, can_answer: bool = True) -> None:
        """Stop application and cluster. Without a GCS, a pending call to Serve would end this process."""
        if can_answer:
            asking = threading.Thread(target=_shut_down_serve, daemon=True)
            asking.start()
            asking.join(STATUS_TIMEOUT_S)
        ray.shutdown()
        self.cluster.shutdown()

    def deploy(self, config: AppConfig) -> None:
        """Start the application, or replace its replicas one by one; returns when that is done."""
        serve.run(build(config), name=APP, route_prefix="/")
        self.config = config

    async def engines(self) -> list[str]:
        """Replicas that report metrics."""
        samples = await self._samples()
        return sorted({replica for name, replica, _ in samples if name == "specray_steps_total"})

    async def is_ready(self) -> bool:
        """Whether all engines run and the ingress is ready."""
        return len(await self.engines()) == self.config.server.num_replicas and await self._status("/readyz") == 200

    async def is_idle(self) -> bool:
        """Whether no engine has running or waiting requests or used KV blocks."""
        samples = await self._samples()
        return bool(samples) and not any(value for name, _, value in samples if name in BUSY)

    async def by_engine(self, name: str) -> Counter[str]:
        """Value of a counter by replica."""
        totals = Counter[str]()
        for sample, replica, value in await self._samples():
            if sample == name:
                totals[replica] += int(value)
        return totals

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


NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


def ray_config(setting: Setting, folder: Path) -> dict[str, Any]:
    """Ray's own options for a setting."""
    match setting:
        case Setting.STORED:
            return {"gcs_storage": "rocksdb", "gcs_storage_path": str(folder / "gcs")}
        case Setting.VOLATILE:
            return {}
        case Setting.LOSSY:
            lost = {"num_failures": -1, "req_failure_prob": LOST_PERCENT, "resp_failure_prob": LOST_PERCENT}
            return {"testing_rpc_failure": json.dumps(dict.fromkeys(LOST_CALLS, lost))}


@contextmanager
def started(config: AppConfig, setting: Setting, folder: Path) -> Iterator[Service]:
    """Run the service on two nodes of one CPU each."""
    os.environ.update(RAY_OPTIONS | {"RAY_USAGE_STATS_ENABLED": "0"})
    paths = [str(INJECTION), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # workers import this checkout
    service = Service(config, setting, folder)
    try:
        service.start()
        yield service
    finally:
        service.end()


def _shut_down_serve() -> None:
    with suppress(Exception):  # the cluster may be unreachable
        serve.shutdown()  # type: ignore[no-untyped-call]
