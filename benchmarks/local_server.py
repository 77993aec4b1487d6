"""`specray serve` as a child process: start it, wait until it is ready, and stop it with all its processes.

The processes of the server are found by a private folder's name, which they inherit in their environment.
"""

import os
import shutil
import signal
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

import yaml

from specray.cli.local_server import OPENER, ServerStartError, reachable, refuse_port_in_use
from specray.private_folders import end_processes, make_folder
from specray.yaml_file import read_mapping

POLL_SECONDS = 0.5
STOP_SECONDS = 30
LEAVE_SECONDS = 5
LOG_TAIL_LINES = 30


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


_SERVE = [sys.executable, "-P", "-m", "specray.cli.main", "serve"]
