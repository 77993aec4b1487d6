"""Finding processes of this test run's cluster, and waiting for their end or any other state."""

import os
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 60.0  # for what comes at once on an idle machine: a green test never waits for it


def own_processes(title: str) -> list[int]:
    """Descendants of this process whose title or program name starts with `title`. Fails if there are none."""
    found = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    found = [pid for pid in found if _name(pid).startswith(title) and is_below(pid)]
    assert found, f"this process has no descendant {title}"
    return found


def _name(pid: int) -> str:
    return read(Path(f"/proc/{pid}/cmdline")).partition("\0")[0].rpartition("/")[2]


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie."""
    status = read(Path(f"/proc/{pid}/status"))
    return "\nState:\tZ" in status or "State:" not in status


def wait_until(condition: Callable[[], object], seconds: float = TIMEOUT_S) -> None:
    """Wait for all that is asserted next: another thread sets one state after the other."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


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
