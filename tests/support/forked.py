"""Processes with other environment variables, forked from one that has imported torch and pytest once."""

import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
PROCESSES = get_context("forkserver")
# What most processes import, for seconds. None of it reads an environment variable that tests change.
IMPORTED = ["tests.support.engine", "specray.models.transformers_model", "hypothesis.strategies", "llguidance"]
PROCESSES.set_forkserver_preload([__name__, *IMPORTED])


class Ended(NamedTuple):
    status: int
    output: str  # stdout and stderr


def run_pytest(arguments: Sequence[str], **environment: str) -> Ended:
    """`pytest arguments` in the repository's root, in a process with these variables."""
    return _ended(_pytest, list(arguments), environment)


def call(function: str, **environment: str) -> Ended:
    """The function without arguments that this path, `module:name`, names, in a process with these variables."""
    return _ended(_call, function, environment)


def run_script(script: Path, *arguments: object, **environment: str) -> Ended:
    """`python script arguments` in the repository's root, in a process with these variables."""
    return _ended(_script, [str(script), *map(str, arguments)], environment)


def _ended(target: object, argument: object, environment: dict[str, str]) -> Ended:
    with TemporaryDirectory() as folder:
        output = Path(folder, "output")
        process = PROCESSES.Process(target=target, args=(argument, environment, str(output)))
        process.start()
        process.join(TIMEOUT_S)
        has_ended = process.exitcode is not None
        if not has_ended:
            process.kill()
            process.join()
        shown = output.read_text(errors="replace") if output.exists() else ""
        assert has_ended, f"no end within {TIMEOUT_S:g} s: {shown[-3000:]}"
        return Ended(process.exitcode or 0, shown)


def _pytest(arguments: list[str], environment: dict[str, str], output: str) -> None:
    _enter(environment, output)
    os.chdir(ROOT)
    sys.exit(int(pytest.main(arguments)))


def _script(arguments: list[str], environment: dict[str, str], output: str) -> None:
    _enter(environment, output)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def _call(function: str, environment: dict[str, str], output: str) -> None:
    _enter(environment, output)
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)()


def _enter(environment: dict[str, str], output: str) -> None:
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
