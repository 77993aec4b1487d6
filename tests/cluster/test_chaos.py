"""A short run of `make chaos`, with its own cluster in its own process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_request_is_accounted_for_under_faults() -> None:
    chaos = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert chaos.returncode == 0, chaos.stdout + chaos.stderr
