"""A server as a child process: waiting until it is ready, stopping all its processes. It is a script without Ray."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import local_server
from benchmarks.local_server import LocalServer
from specray.cli.local_server import ServerStartError, free_port
from tests.support.processes import TIMEOUT_S, has_ended, wait_until

ROOT = Path(__file__).parents[3]
HEALTHY = """
import http.server, subprocess, sys, yaml
stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b"fine")
port = yaml.safe_load(open(sys.argv[-1]))["http_options"]["port"]
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": []}))
    return path


def use_script(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    script = folder / "serve"
    script.write_text(program)
    monkeypatch.setattr(local_server, "_SERVE", [sys.executable, str(script)])


def test_a_server_is_stopped_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Path, port: int
) -> None:
    use_script(monkeypatch, tmp_path, HEALTHY)
    with LocalServer(config, port) as server:
        server.wait_until_ready(timeout=60)
        assert server.url == f"http://127.0.0.1:{port}"
        assert server.get("/health") == "fine"
        child = int(server.log_tail().split("child ")[1].split()[0])
        folder = server._folder
    assert not folder.exists()
    wait_until(lambda: has_ended(child))


@pytest.mark.parametrize(
    ("program", "timeout", "reason"),
    [
        ("print('no such model'); raise SystemExit(3)", 60.0, "ended with status 3.*no such model"),
        ("import time; print('thinking', flush=True); time.sleep(60)", 8.0, "not ready after 8 s.*thinking"),
    ],
)
def test_a_server_that_does_not_start_is_an_error_with_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Path, port: int, program: str, timeout: float, reason: str
) -> None:
    use_script(monkeypatch, tmp_path, program)
    with (
        pytest.raises(ServerStartError, match=f"(?s){reason}"),
        LocalServer(config, port) as server,
    ):
        server.wait_until_ready(timeout)


def test_sigterm_also_stops_the_server(tmp_path: Path, config: Path, port: int) -> None:
    """Regression: a terminated benchmark left two servers running."""
    (tmp_path / "serve").write_text(HEALTHY)
    program = f"""
import sys, time
from pathlib import Path
from benchmarks import local_server
local_server._SERVE = [sys.executable, {str(tmp_path / "serve")!r}]
with local_server.LocalServer(Path({str(config)!r}), {port}) as server:
    server.wait_until_ready(timeout=60)
    print(server.log_tail().split("child ")[1].split()[0], server._folder, flush=True)
    time.sleep(60)
"""
    bench = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    child, folder = bench.stdout.readline().split()
    bench.terminate()
    assert bench.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    wait_until(lambda: has_ended(int(child)))
    assert not Path(folder).exists()


def test_a_port_in_use_is_an_error(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"127.0.0.1:{number} .*--port"), LocalServer(config, number):
            pass


def test_a_missing_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        LocalServer(tmp_path / "nothing.yaml")
