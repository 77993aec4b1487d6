"""Processes: our own cluster's by their title (other clusters on the machine are not ours to touch), and their end."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def own_processes(title: str) -> list[int]:
    """Processes below this one whose title, or program's name, begins so; there must be some."""
    found = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    found = [pid for pid in found if _name(pid).startswith(title) and is_below(pid)]
    assert found, f"no process {title} of ours"
    return found


def _name(pid: int) -> str:
    return read(Path(f"/proc/{pid}/cmdline")).partition("\0")[0].rpartition("/")[2]


def has_ended(pid: int) -> bool:
    """Gone, or dead with an adopter that has not noticed yet."""
    status = read(Path(f"/proc/{pid}/status"))
    return "\nState:\tZ" in status or "State:" not in status


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)


def is_below(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1] or 0)
    return False


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return "() 0 0"
