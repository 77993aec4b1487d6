"""The short form of `make chaos`: a cluster of its own, in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_request_is_accounted_for_whatever_breaks() -> None:
    chaos = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert chaos.returncode == 0, chaos.stdout + chaos.stderr
