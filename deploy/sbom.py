"""Writes a software bill of materials of the environment it runs in: `python deploy/sbom.py sbom.json`.

CycloneDX 1.5 in JSON, from the metadata of installed packages: SpecRay and everything it requires, with versions,
licences and who requires whom. It has no hashes: pip does not keep those of the files that it installed from.
"""

import json
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

ROOT = "specray"
ROOT_EXTRAS = ("demo", "train", "dashboard")  # of what an operator installs
Json = dict[str, Any]


class Package(NamedTuple):
    """An installed package, and the names of those it requires."""

    installed: Distribution
    required: list[str]


def bill_of_materials() -> Json:
    """The document."""
    packages = required_packages()
    purls = {name: _purl(package.installed) for name, package in packages.items()}
    component, *components = [_component(package.installed) for package in packages.values()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {"timestamp": datetime.now(UTC).isoformat(), "component": component | {"type": "application"}},
        "components": components,
        "dependencies": [
            {"ref": purls[name], "dependsOn": [purls[child] for child in package.required]}
            for name, package in packages.items()
        ],
    }


def required_packages() -> dict[str, Package]:
    """Installed packages that SpecRay requires, directly or not, by name; itself first."""
    extras: dict[str, set[str]] = {}  # that are asked of each package
    waiting = [(ROOT, set(ROOT_EXTRAS))]
    while waiting:
        name, wanted = waiting.pop()
        if not _is_installed(name) or (name in extras and wanted <= extras[name]):
            continue  # not installed: of an extra that was left out
        extras[name] = extras.get(name, set()) | wanted
        waiting += _requirements(distribution(name), extras[name])
    names = [ROOT, *sorted(extras.keys() - {ROOT})]
    return {name: Package(distribution(name), _children(name, extras)) for name in names}


def _children(name: str, extras: dict[str, set[str]]) -> list[str]:
    return sorted({child for child, _ in _requirements(distribution(name), extras[name]) if child in extras})


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _requirements(package: Distribution, extras: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
    """(name, extras) of each requirement that applies here."""
    for text in package.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield normalized(requirement.name), set(requirement.extras)


def normalized(name: str) -> str:
    """A package's name as PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _component(package: Distribution) -> Json:
    component: Json = {
        "type": "library",
        "bom-ref": _purl(package),
        "name": package.name,
        "version": package.version,
        "purl": _purl(package),
    }
    if licence := package.metadata.get("License-Expression"):
        component["licenses"] = [{"expression": licence}]
    elif (licence := package.metadata.get("License")) and "\n" not in licence:
        component["licenses"] = [{"license": {"name": licence}}]
    return component


def _purl(package: Distribution) -> str:
    return f"pkg:pypi/{normalized(package.name)}@{package.version}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(bill_of_materials(), indent=2), encoding="utf-8")
