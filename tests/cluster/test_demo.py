"""`make demo` on a real Ray cluster with the embedded model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo import QUESTIONS
from specray.cli.local_server import free_port
from specray.ops.cpu.library import kernels
from specray.private_folders import processes_with

ROOT = Path(__file__).parents[2]
MARK = "STARTED_BY_THE_DEMO_OF"


@pytest.mark.cluster
@pytest.mark.slow
def test_the_demo_compares_answers_and_leaves_no_process_behind(tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo", "--port", str(free_port()), "--max-tokens", "16"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr + demo.stdout
    assert "List 3 countries and their capitals." in demo.stdout
    table = [line for line in demo.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(QUESTIONS), table
    if kernels() is not None:
        assert all("yes" in line for line in table[2:]), table
        assert f"gave the same {len(QUESTIONS)} answers" in demo.stdout.splitlines()[-1]
    assert not list(processes_with(MARK, tmp_path))
