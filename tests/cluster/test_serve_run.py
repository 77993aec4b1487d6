"""`serve run configs/eagle3.yaml`: the command in that file's first lines, as a user runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from specray.cli.local_server import free_port
from tests.support.nodes import JOIN_ATTEMPTS
from tests.support.processes import has_ended, wait_until

ROOT = Path(__file__).parents[2]
START_S = 240.0  # for a busy machine
STOP_S = 90.0

pytestmark = pytest.mark.slow  # so it comes before the files that share a cluster, which would run beside this one


def test_a_configuration_is_served_by_the_command_in_its_first_lines(tmp_path: Path) -> None:
    text = (ROOT / "configs" / "eagle3.yaml").read_text(encoding="utf-8")
    command = text.splitlines()[1].removeprefix("#").split()
    assert command == ["serve", "run", "configs/eagle3.yaml"]
    url = f"http://127.0.0.1:{free_port()}"
    file = tmp_path / command[-1]
    file.parent.mkdir()
    file.write_text(text.replace("port: 8000", f"port: {url.rpartition(':')[2]}"))  # the file's may be in use
    log = tmp_path / "serve.log"
    serve = started(command, tmp_path, log, url)
    processes = [each.pid for each in psutil.Process(serve.pid).children(recursive=True)]
    try:
        body = {"messages": [{"role": "user", "content": "List 3 countries and their capitals."}], "max_tokens": 16}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body | {"temperature": 0}, timeout=120.0)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["speculative"]["accepted_tokens"] > 0
    finally:
        serve.send_signal(signal.SIGINT)  # as Ctrl-C does
        serve.wait(STOP_S)
    wait_until(lambda: all(map(has_ended, processes)), STOP_S)


def started(command: list[str], folder: Path, log: Path, url: str) -> "subprocess.Popen[bytes]":
    """A server that answers. Now and then a raylet hangs while it starts, as in `tests.support.nodes`."""
    paths = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    environment = os.environ | paths | {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
    for _ in range(JOIN_ATTEMPTS):
        with log.open("wb") as out:
            serve = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        wait_until(lambda serve=serve: serve.poll() is not None or is_healthy(url), START_S)  # type: ignore[misc]
        if serve.poll() is None:
            return serve
        assert "The current node timed out during startup" in log.read_text()
    raise AssertionError(f"Ray has not started in {JOIN_ATTEMPTS} attempts")


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
