"""Temporary folders of processes that were killed are removed, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specray.private_folders import OWNER_FILE, disown, own, remove_leftovers


def folder(parent: Path, name: str, pid: int | None = None, namespace: str | None = None) -> Path:
    """A folder of a process, by default of this one."""
    made = parent / name
    made.mkdir()
    own(made)
    ours, _, _ = (made / OWNER_FILE).read_text().rpartition(" ")
    (made / OWNER_FILE).write_text(f"{namespace or ours} {os.getpid() if pid is None else pid}")
    return made


@pytest.fixture(scope="module")
def ended() -> int:
    """The ID of a process that has ended."""
    program = "import os; print(os.getpid())"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def test_only_folders_of_ended_processes_are_removed(tmp_path: Path, ended: int) -> None:
    folder(tmp_path, "specray-killed", ended)
    folder(tmp_path, "specray-running")
    folder(tmp_path, "specray-of-another-user", 1)
    folder(tmp_path, "specray-in-a-container", ended, "pid:[1]")
    folder(tmp_path, "other", ended)
    disown(folder(tmp_path, "specray-with-logs", ended))
    (folder(tmp_path, "specray-broken") / OWNER_FILE).write_text("?")
    remove_leftovers(tmp_path)
    kept = {"running", "of-another-user", "in-a-container", "with-logs", "broken"}
    assert {path.name for path in tmp_path.iterdir()} == {"other", *(f"specray-{name}" for name in kept)}
