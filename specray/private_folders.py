"""Temporary folders of running processes: removing those that killed processes left, and ending processes by folder."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "specray-"
OWNER_FILE = "owner"  # in a folder: the process it belongs to
SCAN_S = 0.1
_TEMPORARY = Path("/tmp")  # short: Ray creates Unix sockets below it, whose paths have at most 107 characters


def make_folder() -> Path:
    """A new folder of this process, with mode 0700, in place of those that ended processes have left."""
    remove_leftovers(_TEMPORARY)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_TEMPORARY))
    own(folder)
    return folder


def own(folder: Path) -> None:
    """Mark a folder as this process's. It is removed once the process has ended, by the next one that starts here."""
    (folder / OWNER_FILE).write_text(f"{_namespace()} {os.getpid()}", encoding="ascii")


def disown(folder: Path) -> None:
    """Keep the folder."""
    (folder / OWNER_FILE).unlink(missing_ok=True)


def remove_leftovers(parent: Path) -> None:
    """Remove the folders in `parent` whose owners have ended."""
    for file in parent.glob(f"{PREFIX}*/{OWNER_FILE}"):
        with suppress(OSError):  # the folder of another user, or one that has just been removed
            if _has_ended(file.read_text(encoding="ascii", errors="replace")):
                shutil.rmtree(file.parent, ignore_errors=True)


def processes_with(variable: str, folder: Path) -> Iterator[int]:
    """Other processes that have the folder as a variable of their environment, as all that are started with it have."""
    marker = f"{variable}={folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def end_processes(variable: str, folder: Path, patience_s: float, give_up_s: float = 0.0) -> None:
    """Kill the processes of `processes_with` that have not ended by themselves in `patience_s` seconds.

    Returns when none is left, or `give_up_s` seconds after the first was killed.
    """
    kill_at = time.monotonic() + patience_s
    while pids := list(processes_with(variable, folder)):
        if (now := time.monotonic()) >= kill_at:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if now >= kill_at + give_up_s:
                return
        time.sleep(SCAN_S)


def _has_ended(owner: str) -> bool:
    namespace, _, pid = owner.rpartition(" ")
    if namespace != _namespace() or not pid.isdecimal():
        return False  # a container that shares the folder has process IDs of its own
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it runs, as another user
        return False
    return False


def _namespace() -> str:
    """Identifies the process IDs' namespace, where there are several."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"
