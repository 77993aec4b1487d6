"""Signatures of other projects' functions, read from their sources without importing them.

tests/data/signatures.json has those that SpecRay calls: names and kinds of parameters, no code and no defaults. To
renew it for other versions of the packages:

    pip download --no-deps flashinfer-python==VERSION vllm==VERSION
    python -m tests.support.signatures *.whl
"""

import ast
import json
import sys
import zipfile
from email.parser import Parser
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "signatures.json"
_CLASS = "BatchPrefillWithPagedKVCacheWrapper"
# distribution -> file in its wheel -> (functions, attributes that methods of a class set)
_WANTED: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "flashinfer-python": {
        "flashinfer/prefill.py": (
            [f"{_CLASS}.{method}" for method in ("__init__", "plan", "run")],
            [f"{_CLASS}._mask_indptr_buf"],
        )
    },
    "vllm": {
        "vllm/vllm_flash_attn/flash_attn_interface.py": (["flash_attn_varlen_func", "is_fa_version_supported"], []),
    },
}


def recorded() -> dict[str, Any]:
    """version, licence, functions and attributes by distribution."""
    facts: dict[str, Any] = json.loads(FILE.read_text())
    return facts


def signature(distribution: str, name: str) -> Signature:
    """The recorded signature of a function, or of a method with its `self`; every default is None."""
    return signature_in(f"def recorded({recorded()[distribution]['functions'][name]}): ...", "recorded")


def signature_in(source: str, name: str) -> Signature:
    """The signature of function `name`, or of method `Class.name`."""
    arguments = _function(source, name).args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parameters = [
        _parameter(
            argument, Parameter.POSITIONAL_ONLY if argument in arguments.posonlyargs else _EITHER, default is not None
        )
        for argument, default in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, Parameter.KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


_EITHER = Parameter.POSITIONAL_OR_KEYWORD


def _parameter(argument: ast.arg, kind: Any, is_optional: bool = False) -> Parameter:
    return Parameter(argument.arg, kind, default=None if is_optional else Parameter.empty)


def _function(source: str, name: str) -> ast.FunctionDef:
    scope: ast.Module | ast.ClassDef = ast.parse(source)
    *classes, function = name.split(".")
    for each in classes:
        scope = next(node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == each)
    # The last one: those before it are overloads.
    return [node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == function][-1]


def _sets_attribute(source: str, name: str) -> bool:
    """Whether a method of the class sets `self.<attribute>`, for the name `Class.<attribute>`."""
    owner, attribute = name.split(".")
    scope = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == owner)
    targets = [target for node in ast.walk(scope) if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Attribute) and target.attr == attribute for target in targets)


def _read(wheel: Path) -> tuple[str, dict[str, Any]]:
    functions: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        facts = Parser().parsestr(archive.read(metadata).decode())
        for file, (names, attributes) in _WANTED[facts["Name"]].items():
            source = archive.read(file).decode()
            functions |= {name: str(signature_in(source, name))[1:-1] for name in names}
            assert all(_sets_attribute(source, name) for name in attributes), f"{file} does not set {attributes}"
    found = {"version": facts["Version"], "licence": facts["License-Expression"], "functions": functions}
    return facts["Name"], found


if __name__ == "__main__":
    read = dict(_read(Path(wheel)) for wheel in sys.argv[1:])
    FILE.write_text(json.dumps(read, indent=1) + "\n")
    print(FILE, *(f"{name}={facts['version']}" for name, facts in read.items()))
