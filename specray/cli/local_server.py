"""`specray serve` as a child process: start it, wait until it is ready, and stop it with all its processes.

For the demo and the benchmarks. The processes of the server are found by a private folder's name, which they inherit in
their environment.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import ProxyHandler, build_opener

import yaml

from specray.errors import SpecRayError
from specray.private_folders import end_processes, make_folder
from specray.yaml_file import read_mapping

POLL_SECONDS = 0.5
STOP_SECONDS = 30
LEAVE_SECONDS = 5
LOG_TAIL_LINES = 30
CHOSEN_PORTS = (20_000, 30_000)
OPENER = build_opener(ProxyHandler({}))  # no proxy from the environment: the server is local


def free_port() -> int:
    """An unused TCP port on loopback, below the ephemeral range: Ray's processes take ports from that."""
    while True:
        port = random.SystemRandom().randrange(*CHOSEN_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ServerStartError(SpecRayError):
    """The server could not be started; the message ends with its log."""


class LocalServer:
    """A running server: `with LocalServer(config) as server: server.wait_until_ready()`, then use `server.url`."""

    def __init__(self, config: Path, port: int | None = None) -> None:
        document = read_mapping(config, "`applications`")
        http = document.setdefault("http_options", {})
        self._host = http.get("host", "127.0.0.1")
        self._port = http["port"] = port or http.get("port", 8000)
        self._config = config
        self._document = document
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    @property
    def url(self) -> str:
        return f"http://{reachable(self._host)}:{self._port}"

    def __enter__(self) -> Self:
        refuse_port_in_use(self._host, self._port)
        _stop_on_sigterm()
        self._folder = make_folder()
        config = self._folder / self._config.name
        config.write_text(yaml.safe_dump(self._document), encoding="utf-8")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*_SERVE, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_TMPDIR": str(self._folder)},
                start_new_session=True,  # Ctrl-C reaches this process only, which stops the server
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout: float = 300.0, tick: Callable[[float], None] = lambda _: None) -> float:
        """Wait until /health answers 200 and return the seconds it took; `tick` is called with the seconds so far.

        Raises ServerStartError if the server exits or takes longer than `timeout`.
        """
        start = time.monotonic()
        while not self._is_healthy():
            waited = time.monotonic() - start
            if reason := self._reason_to_give_up(waited, timeout):
                raise ServerStartError(
                    f"`specray serve {self._config}` {reason}; its log ends with:\n{self.log_tail()}"
                )
            tick(waited)
            time.sleep(POLL_SECONDS)
        return time.monotonic() - start

    def get(self, path: str) -> str:
        """Body of a GET request. OSError if it fails."""
        with OPENER.open(self.url + path, timeout=10) as response:
            body: bytes = response.read()
        return body.decode()

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Stop the server and all its processes, and remove its folder."""
        if self._process is None:
            return
        self._process.terminate()  # children of a background script ignore SIGINT
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        end_processes("RAY_TMPDIR", self._folder, LEAVE_SECONDS)  # Ray's daemons outlive their driver for some time
        self._process.wait()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._folder / "serve.log"

    def _is_healthy(self) -> bool:
        try:
            self.get("/health")
        except (HTTPException, OSError):  # another process may have the port
            return False
        return True

    def _reason_to_give_up(self, waited: float, timeout: float) -> str | None:
        assert self._process is not None, "not entered"
        if (status := self._process.poll()) is not None:
            return f"ended with status {status}"
        return f"was not ready after {timeout:.0f} s" if waited > timeout else None


def _stop_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that servers are stopped, unless another handler is installed."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def refuse_port_in_use(host: str, port: int) -> None:
    """ServerStartError if the port cannot be bound, by IPv4 or IPv6."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address[0], port, *address[2:]))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServerStartError(
            f"cannot listen on {host}:{port} ({reason}); stop the process that uses it, or choose another --host or "
            "--port"
        ) from None


def reachable(host: str) -> str:
    """A host for URLs by which a server that listens on `host` can be reached from this machine."""
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return wildcards.get(host, f"[{host}]" if ":" in host else host)


_SERVE = [sys.executable, "-P", "-m", "specray.cli.main", "serve"]
