"""A Ray cluster of two nodes with one application, in processes of its own: `python -m tests.support.two_nodes SPEC`.

Apart from pytest's process, which may be connected to another cluster. `TwoNodes` is its handle there.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
STORE_BYTES = 100 * 2**20
JOIN_S = 60.0
TOKEN = secrets.token_hex(32)


class TwoNodes:
    """The cluster and its application, seen from a test. Started once the first of `await_*` returns."""

    def __init__(self, config: dict[str, Any], port: int, **spec: Any) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.support.two_nodes",
            json.dumps({"config": config, "port": port, **spec}),
        ]
        self._driver = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tell("leave")
        self._driver.wait(60)

    def await_address(self) -> str:
        """Where the second node has to join."""
        return self._await("address ")

    def await_ready(self) -> None:
        self._await("ready")

    def kill_second_node(self) -> None:
        self._tell("kill")
        self._await("killed")

    def _tell(self, command: str) -> None:
        assert self._driver.stdin is not None
        print(command, file=self._driver.stdin, flush=True)

    def _await(self, news: str) -> str:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if line.startswith(news):
                return line.removeprefix(news).strip()
        raise RuntimeError(f"the cluster's driver ended before it said {news!r}")


def environment() -> dict[str, str]:
    """Of every process of the cluster: workers import this checkout, and nobody without the token may join."""
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return os.environ | auth | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


def main(spec: dict[str, Any]) -> None:
    """Start the nodes and the application; `second: null` is a node that joins by itself."""
    import ray
    from ray.cluster_utils import Cluster

    head = spec["head"] | {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        print("address", cluster.address, flush=True)
        if spec["second"] is not None:
            second = cluster.add_node(**spec["second"], object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        await_nodes(2)
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
        assert time.monotonic() < deadline, "the second node did not join"
        time.sleep(0.2)


def deploy(config: dict[str, Any], port: int) -> None:
    """Returns when every engine runs."""
    from ray import serve

    from cluster.app import build
    from cluster.config import AppConfig

    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(AppConfig.model_validate(config)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
