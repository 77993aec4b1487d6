"""Child processes of training."""

import subprocess
import sys
from pathlib import Path

from tests.support.processes import has_ended, wait_until

PARENT = """
import multiprocessing
from specray.train.process import run_with_parent

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=run_with_parent, args=("slow_module", "run")).start()
"""
SLOW = """
import os, time
from pathlib import Path

Path("new").write_text(str(os.getpid()))
Path("new").rename("child")
time.sleep(600)
"""


def test_a_child_ends_with_its_killed_parent_while_it_imports(tmp_path: Path) -> None:
    """On a busy machine the imports of training take half a minute."""
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "slow_module.py").write_text(SLOW)
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path)
    child = tmp_path / "child"
    try:
        wait_until(child.exists)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: has_ended(int(child.read_text())))
