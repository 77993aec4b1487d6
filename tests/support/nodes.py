"""A Ray cluster of several nodes with one application: `python -m tests.support.nodes SPEC`.

It runs outside pytest's process, which may be connected to another cluster. Tests control it through `Nodes`.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
STORE_BYTES = 100 * 2**20
JOIN_S = 120.0
JOIN_ATTEMPTS = 3
TOKEN = secrets.token_hex(32)


class Nodes:
    """Controls the cluster from a test."""

    def __init__(
        self,
        config: dict[str, Any],
        port: int,
        head: dict[str, Any],
        others: list[dict[str, Any]],
        num_joining: int = 0,
    ) -> None:
        """The cluster has the `head` and `others`, and waits for `num_joining` further nodes."""
        spec = {"config": config, "port": port, "head": head, "others": others, "num_joining": num_joining}
        command = [
            sys.executable,
            "-m",
            "tests.support.nodes",
            json.dumps(spec),
        ]
        self._driver = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._driver.poll() is None:
            self._send("leave")
        self._driver.wait(60)

    def address(self) -> str:
        """Where nodes join. Call it once, first."""
        return self._await("address ")

    def await_ready(self) -> None:
        """Wait until every node has joined and every engine runs."""
        self._await("ready")

    def kill_second_node(self) -> None:
        """Kill all processes of the first of the `others`."""
        self._send("kill")
        self._await("killed")

    def _send(self, command: str) -> None:
        assert self._driver.stdin is not None
        print(command, file=self._driver.stdin, flush=True)

    def _await(self, prefix: str) -> str:
        """The rest of the driver's next output line that starts with `prefix`."""
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()
        raise RuntimeError(f"the cluster's driver ended before it printed {prefix!r}")


def environment() -> dict[str, str]:
    """Environment of the cluster's processes: workers import this checkout, and joining requires the token.

    Ray would start a worker for each of the nodes' CPUs ahead of time. Tests name many and use few.
    """
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_prestart_worker_first_driver": "0"}
    return os.environ | auth | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


def _joined(cluster: Any, node: dict[str, Any]) -> Any:
    """A node that has joined. Now and then a raylet hangs while it starts, and Ray gives it up after 30 s."""
    for _ in range(JOIN_ATTEMPTS - 1):
        with contextlib.suppress(Exception):  # Ray raises no narrower one
            return cluster.add_node(**node, object_store_memory=STORE_BYTES)
    return cluster.add_node(**node, object_store_memory=STORE_BYTES)


def main(spec: dict[str, Any]) -> None:
    """Start the nodes and the application."""
    import ray
    from ray.cluster_utils import Cluster

    # Nobody reads the workers' logs here; a process of Ray would collect them. Other nodes have neither anyway.
    without = {"include_dashboard": False, "include_log_monitor": False}
    head = spec["head"] | {"object_store_memory": STORE_BYTES, **without}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        print("address", cluster.address, flush=True)
        second, *_ = [_joined(cluster, node) for node in spec["others"]]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        await_nodes(1 + len(spec["others"]) + spec["num_joining"])
        deploy(spec["config"], spec["port"])
        print("ready", flush=True)
        if sys.stdin.readline().strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
            print("killed", flush=True)
            sys.stdin.readline()
    finally:
        ray.shutdown()
        cluster.shutdown()


def await_nodes(count: int) -> None:
    import ray

    deadline = time.monotonic() + JOIN_S
    while sum(node["Alive"] for node in ray.nodes()) < count:  # type: ignore[no-untyped-call]
        assert time.monotonic() < deadline, f"there are not {count} nodes"
        time.sleep(0.2)


def deploy(config: dict[str, Any], port: int) -> None:
    """Deploy the application, and return once every engine runs."""
    from ray import serve

    from cluster.app import build
    from cluster.config import AppConfig

    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(AppConfig.model_validate(config)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
