"""Servers for notebooks, by the names of `sglang.utils` that documented cells use. A server is a process of its own."""

import shlex
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlsplit

import psutil

from specray.cli.local_server import OPENER, free_port
from specray.errors import ConfigError, SpecRayError

_LAUNCHERS = (["specray", "serve"], ["python3", "-m", "sglang.launch_server"], ["python", "-m", "sglang.launch_server"])
_POLL_S, _PROBE_TIMEOUT_S = 0.5, 5.0
_processes: dict[int, subprocess.Popen[bytes]] = {}  # by port: those that `launch_server_cmd` started


def launch_server_cmd(
    command: str, host: str = "127.0.0.1", port: int | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server by a command line of `specray serve` or `sglang.launch_server`. Returns (process, port).

    A free port is chosen unless `port` or the command names one. The server writes to this process's output; it runs
    until `terminate_process`. ConfigError for another command.
    """
    words = shlex.split(command.replace("\\\n", " "))
    launcher = next((known for known in _LAUNCHERS if words[: len(known)] == known), None)
    if launcher is None:
        raise ConfigError(f"the command begins with {' '.join(words[:3])!r}; begin it with `specray serve`")
    arguments = words[len(launcher) :]
    chosen = _option(arguments, "--port")
    number = int(chosen) if chosen and chosen.isdecimal() else port or free_port()
    arguments += [] if chosen else ["--port", str(number)]
    arguments += [] if _option(arguments, "--host") else ["--host", host]
    program = [sys.executable, "-P", "-m", "specray.cli.main", "serve", *arguments]
    # A session of its own: Ctrl-C in the notebook does not end the server.
    process = subprocess.Popen(program, stdin=subprocess.DEVNULL, start_new_session=True)
    _processes[number] = process
    return process, number


def wait_for_server(
    base_url: str, timeout: float | None = None, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait until the server at `base_url` can serve requests.

    SpecRayError once `timeout` seconds have passed, or if `process`, by default the one that `launch_server_cmd`
    started on this port, has ended.
    """
    process = process or _processes.get(urlsplit(base_url).port or 80)
    start = time.monotonic()
    while not _is_healthy(base_url):
        if process is not None and (status := process.poll()) is not None:
            raise SpecRayError(f"the server for {base_url} ended with status {status}; its output says why")
        if timeout is not None and time.monotonic() - start > timeout:
            raise SpecRayError(f"the server at {base_url} was not ready within {timeout:g} s; raise timeout")
        time.sleep(_POLL_S)


def terminate_process(process: subprocess.Popen[bytes], timeout: float = 60.0) -> None:
    """End a server and all processes that it started, by force after `timeout` seconds."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def print_highlight(text: object) -> None:
    """Print a result in bold."""
    print(f"\x1b[1m{text}\x1b[0m")


def _option(arguments: list[str], name: str) -> str | None:
    """The value of `name VALUE` or `name=VALUE`."""
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if word == name or word.startswith(name + "="):
            return following if word == name else word.removeprefix(name + "=")
    return None


def _is_healthy(base_url: str) -> bool:
    try:
        with OPENER.open(base_url.rstrip("/").removesuffix("/v1") + "/health", timeout=_PROBE_TIMEOUT_S):
            return True
    except (HTTPException, OSError):
        return False
