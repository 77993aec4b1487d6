"""Skipped tests are reported last, and in CI only expected ones pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason="needs an NVIDIA GPU: make test-gpu on one")
def test_gpu():
    pass

@pytest.mark.parametrize("number", range(2))
@pytest.mark.skipif({is_missing}, reason="prometheus is not installed")
def test_program(number):
    pass
"""


@pytest.mark.parametrize(
    ("is_missing", "no_skips", "status", "workers"),
    [(True, "1", 1, ()), (True, "1", 1, ("-n", "1")), (True, "", 0, ()), (False, "1", 0, ())],
)
def test_a_run_ends_with_what_was_skipped_and_fails_in_ci_for_what_was_missing(
    is_missing: bool, no_skips: str, status: int, workers: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS.format(is_missing=is_missing))
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.skips", *workers]
    environment = {**os.environ, "SPECRAY_NO_SKIPS": no_skips, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(file)],
        cwd=tmp_path, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    last = done.stdout.rstrip().splitlines()[-3:]
    assert any(line.startswith("skipped 1: needs an NVIDIA GPU: make test-gpu on one (") for line in last)
    assert ("skipped 2: prometheus is not installed (test_some.py)" in last) == is_missing
    assert ("2 tests were skipped that must run here" in last[-1]) == (status == 1)
