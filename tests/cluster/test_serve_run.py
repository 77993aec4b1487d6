"""`serve run configs/eagle3.yaml`: the command in that file's first lines, as a user types it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from specray.cli.local_server import free_port
from tests.support.nodes import JOIN_ATTEMPTS
from tests.support.processes import has_ended, wait_until

ROOT = Path(__file__).parents[2]
START_S = 480.0  # for a busy machine
STOP_S = 90.0

pytestmark = pytest.mark.slow  # so it comes before the files that share a cluster, which would run beside this one


def test_a_configuration_is_served_by_the_command_in_its_first_lines(tmp_path: Path) -> None:
    """Outside of the repository, where only what is installed can be imported."""
    text = (ROOT / "configs" / "eagle3.yaml").read_text(encoding="utf-8")
    command = text.splitlines()[1].removeprefix("#").split()
    assert command == ["serve", "run", "configs/eagle3.yaml"]
    port = free_port()
    file = tmp_path / command[-1]
    file.parent.mkdir()
    file.write_text(text.replace("port: 8000", f"port: {port}"))  # the file's may be in use
    url = f"http://127.0.0.1:{port}"
    serve = started(command, tmp_path, url)
    processes = [each.pid for each in psutil.Process(serve.pid).children(recursive=True)]
    try:
        drafted, plain = answer(url), answer(url, enabled=False)
        assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
        assert drafted["choices"][0]["message"]["content"]
        accepted = [reply["usage"]["speculative"]["accepted_tokens"] for reply in (drafted, plain)]
        assert accepted[0] > accepted[1] == 0
    finally:
        serve.send_signal(signal.SIGINT)  # as Ctrl-C does
        serve.wait(STOP_S)
    assert processes
    wait_until(lambda: all(map(has_ended, processes)), STOP_S)


def started(command: list[str], folder: Path, url: str) -> "subprocess.Popen[bytes]":
    """A server that answers. Now and then a raylet hangs while it starts, as in `tests.support.nodes`."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    # Not an operator's cluster on this machine; and with Ray's niceness of 15, an engine starts late beside other work.
    ray = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    log = folder / "serve.log"
    for _ in range(JOIN_ATTEMPTS):
        with log.open("wb") as out:
            serve = subprocess.Popen(
                command,
                cwd=folder,
                env=usual | path | ray,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a script's background
            )
        try:
            wait_until(lambda serve=serve: serve.poll() is not None or is_healthy(url), START_S)  # type: ignore[misc]
        except AssertionError:
            serve.send_signal(signal.SIGINT)
            serve.wait(STOP_S)
            raise AssertionError(log.read_text()) from None
        if serve.poll() is None:
            return serve
        assert "The current node timed out during startup" in log.read_text(), log.read_text()
    raise AssertionError(f"Ray has not started in {JOIN_ATTEMPTS} attempts")


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def answer(url: str, **speculative: Any) -> Any:
    messages = [{"role": "user", "content": "List 3 countries and their capitals."}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "speculative": speculative}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120.0)
    assert reply.status_code == 200, reply.text
    return reply.json()
