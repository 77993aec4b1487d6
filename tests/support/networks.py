"""A second network on this machine whose link to the first can be cut. Linux only, requires root."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Self

END_S = 20.0


class Network:
    """A network namespace and a pair of virtual interfaces, with addresses reserved for testing."""

    near_address = "198.18.0.1"
    far_address = "198.18.0.2"

    def __init__(self) -> None:
        self._name = f"specray-{os.getpid()}"
        self._near = f"spr{os.getpid()}"

    @staticmethod
    def can_be_made() -> bool:
        if shutil.which("ip") is None or os.geteuid() != 0:
            return False
        name = f"specray-{os.getpid()}-probe"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
        return made and subprocess.run(["ip", "netns", "delete", name], check=False).returncode == 0

    def __enter__(self) -> Self:
        _ip("netns", "add", self._name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", "far", "netns", self._name)
        _ip("address", "add", f"{self.near_address}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        _ip("-n", self._name, "address", "add", f"{self.far_address}/30", "dev", "far")
        for interface in ("far", "lo"):
            _ip("-n", self._name, "link", "set", interface, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.end_processes()
        _ip("link", "delete", self._near)
        _ip("netns", "delete", self._name)

    def run(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a command in the second network."""
        return subprocess.Popen(["ip", "netns", "exec", self._name, *command], **options)

    def cut(self) -> None:
        """Drop all traffic from now on, without closing connections."""
        _ip("link", "set", self._near, "down")

    def end_processes(self) -> None:
        """Kill all processes in the second network."""
        deadline = time.monotonic() + END_S
        while pids := _ip("netns", "pids", self._name).split():
            assert time.monotonic() < deadline, f"{pids} do not end"
            for pid in pids:
                _kill(int(pid))
            time.sleep(0.1)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
