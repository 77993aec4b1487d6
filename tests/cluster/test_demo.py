"""`make demo` on a real Ray cluster with the embedded model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specray.cli.local_server import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.cluster
@pytest.mark.slow
def test_the_demo_compares_answers_and_leaves_no_process_behind() -> None:
    before = set(Path("/tmp").glob("specray-serve-*"))
    demo = subprocess.run(
        [sys.executable, "-m", "specray.cli.demo", "--port", str(free_port())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr + demo.stdout
    assert "List 3 countries and their capitals." in demo.stdout
    assert demo.stdout.count("accept length") >= 3
    assert "speculation on (EAGLE-3)" in demo.stdout
    assert "speculation off" in demo.stdout
    assert demo.stdout.count("times plain decoding.") == 2
    assert "identical" in demo.stdout  # also in the explanation of a difference
    assert set(Path("/tmp").glob("specray-serve-*")) <= before
