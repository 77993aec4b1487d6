"""`specray serve` as a child of this process: started, waited for, stopped without a trace.

For the demo and the benches. Everything it starts inherits a private folder's name in its environment, and is found by
that when it has to go. Not here: talking to the server (`chat`), and any import of Ray.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import yaml

from specray.errors import SpecRayError

POLL_SECONDS = 0.5
STOP_SECONDS = 30
LOG_TAIL_LINES = 30


def free_port() -> int:
    """A TCP port of loopback nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerStartError(SpecRayError):
    """The server could not be started, with the tail of its log where there is one."""


class LocalServer:
    """A running server: `with LocalServer(config) as server: server.wait_until_ready()`, then use `server.url`."""

    def __init__(self, config: Path, port: int | None = None) -> None:
        document = _read(config)
        http = document.setdefault("http_options", {})
        self._host = http.get("host", "127.0.0.1")
        self._port = http["port"] = port or http.get("port", 8000)
        self._config = config
        self._document = document
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def __enter__(self) -> Self:
        refuse_port_in_use(self._host, self._port)
        _stop_on_sigterm()
        # Short, because Ray puts unix sockets below it and their paths end at 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="specray-serve-", dir="/tmp"))
        config = self._folder / self._config.name
        config.write_text(yaml.safe_dump(self._document), encoding="utf-8")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*_SERVE, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_TMPDIR": str(self._folder)},
                start_new_session=True,  # Ctrl-C is for us; the server is stopped in order
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout: float = 300.0, tick: Callable[[float], None] = lambda _: None) -> float:
        """Return the seconds it took until /health said 200, calling `tick` with the seconds so far.

        Raises ServerStartError if the server ends or takes longer than `timeout`.
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
        """Body of a GET; OSError where there is no good answer."""
        with _OPENER.open(self.url + path, timeout=10) as response:
            body: bytes = response.read()
        return body.decode()

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Stop the server and whatever it started; nothing is left, not even its folder."""
        if self._process is None:
            return
        self._process.terminate()  # SIGINT is ignored by what was started from a script in the background
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._end_leftovers()
        self._process.wait()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._folder / "serve.log"

    def _is_healthy(self) -> bool:
        try:
            self.get("/health")
        except (URLError, OSError):
            return False
        return True

    def _reason_to_give_up(self, waited: float, timeout: float) -> str | None:
        assert self._process is not None, "not entered"
        if (status := self._process.poll()) is not None:
            return f"ended with status {status}"
        return f"was not ready after {timeout:.0f} s" if waited > timeout else None

    def _end_leftovers(self) -> None:
        """Ray's daemons end with their driver; those that have not after a while are killed."""
        deadline = time.monotonic() + 5
        while (pids := list(_processes_of(self._folder))) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stop_on_sigterm() -> None:
    """Have SIGTERM end this process by an exception, so that it stops its servers; unless somebody else sees to it."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def refuse_port_in_use(host: str, port: int) -> None:
    """ServerStartError if nobody can listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ServerStartError(
                f"{host}:{port} cannot be listened on ({reason}); stop what uses it or choose another port with --port"
            ) from None


_SERVE = [sys.executable, "-m", "specray.cli.main", "serve"]
_OPENER = build_opener(ProxyHandler({}))  # a proxy has no business between us and our own child


def _read(config: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ServerStartError(f"cannot read {config}: {error}") from None
    assert isinstance(document, dict), "configs are checked by tests"
    return document


def _processes_of(folder: Path) -> Iterator[int]:
    """Living processes that have the folder's name in their environment, this one never."""
    marker = f"RAY_TMPDIR={folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
