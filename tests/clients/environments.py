"""Makes an environment for each client on first use: a virtual environment with pip, or a folder with npm."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.environments import InstallError, reason_of

FOLDER = Path(__file__).parent
INSTALLED = ".installed"


class Client(NamedTuple):
    """A client. `requirements/NAME.txt` or `.json` pins its versions; `scenarios/SCRIPT` uses it."""

    name: str
    script: str

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def requirements(self) -> Path:
        return FOLDER / "requirements" / f"{self.name}.{'json' if self.is_node else 'txt'}"

    @property
    def path(self) -> Path:
        return FOLDER / "scenarios" / self.script


CLIENTS = {
    client.name: client
    for client in (
        Client("openai-python", "use_openai.py"),
        Client("openai-node", "use_openai.mjs"),
        Client("langchain-openai", "use_langchain_openai.py"),
        Client("llama-index", "use_llama_index.py"),
        Client("litellm", "use_litellm.py"),
        Client("instructor", "use_instructor.py"),
        Client("pydantic-ai", "use_pydantic_ai.py"),
        Client("anthropic", "use_anthropic.py"),
        Client("llm-comply", "use_llm_comply.py"),
    )
}


class Environment(NamedTuple):
    """Where a client is installed, and the program that runs its scripts."""

    folder: Path
    program: Path


def environment_of(client: Client, build: Path, say: Callable[[str], None]) -> Environment:
    """The client's environment under `build`, made again when its requirements change. InstallError if it cannot be."""
    folder = build / client.name
    marker, recipe = folder / INSTALLED, client.requirements.read_text(encoding="utf-8")
    program = folder / ("node_modules/node/bin/node" if client.is_node else "bin/python")
    if marker.is_file() and marker.read_text(encoding="utf-8") == recipe:
        return Environment(folder, program)
    say(f"installing {client.name} in {folder}: once")
    shutil.rmtree(folder, ignore_errors=True)
    (_install_node if client.is_node else _install_python)(client, folder)
    marker.write_text(recipe, encoding="utf-8")
    return Environment(folder, program)


def _install_python(client: Client, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--no-deps", "--no-compile", "--requirement", str(client.requirements)])
    _run([*pip, "check"])


def _install_node(client: Client, folder: Path) -> None:
    """npm may come with an older node than the client needs, so node is one of the requirements."""
    if (npm := shutil.which("npm")) is None:
        raise InstallError("npm is not installed")
    folder.mkdir(parents=True)
    shutil.copy(client.requirements, folder / "package.json")
    _run([npm, "install", "--no-package-lock", "--no-audit", "--no-fund"], folder)


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise InstallError(reason_of(result.stdout + result.stderr))
