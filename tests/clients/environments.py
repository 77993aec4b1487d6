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
    command: str | None = None  # where npm puts a program that the script and the page's examples run, as a pattern
    is_whole: bool = True  # False: only what the part of the package needs that is used, so pip's check would fail
    # HF_HUB_OFFLINE: SGLang looks for a tokenizer's folder on the hub, with retries, if it is not set; AIPerf if it is.
    is_offline: bool = False

    @property
    def is_node(self) -> bool:
        return self.command is not None or self.script.endswith(".mjs")

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
        Client("claude-code", "use_claude_code.py", "@anthropic-ai/claude-code-*/claude"),
        Client("codex", "use_codex.py", "@openai/codex-*/vendor/*/bin/codex"),
        Client("opencode", "use_opencode.py", "opencode-*/bin/opencode"),
        Client("open-webui", "use_open_webui.py"),
        Client("sglang", "use_sglang.py", is_whole=False, is_offline=True),
        Client("aiperf", "use_aiperf.py"),
    )
}


class Environment(NamedTuple):
    """Where a client is installed, the program that runs its scripts, and the folder of its own command."""

    folder: Path
    program: Path
    commands: Path | None = None


def environment_of(client: Client, build: Path, say: Callable[[str], None]) -> Environment:
    """The client's environment under `build`, made again when its requirements change. InstallError if it cannot be."""
    folder = build / client.name
    marker, recipe = folder / INSTALLED, client.requirements.read_text(encoding="utf-8")
    if marker.is_file() and marker.read_text(encoding="utf-8") == recipe:
        return _environment(client, folder)
    say(f"installing {client.name} in {folder}: once")
    shutil.rmtree(folder, ignore_errors=True)
    (_install_node if client.is_node else _install_python)(client, folder)
    marker.write_text(recipe, encoding="utf-8")
    return _environment(client, folder)


def _environment(client: Client, folder: Path) -> Environment:
    if client.command is None:
        program = folder / ("node_modules/node/bin/node" if client.is_node else "bin/python")
        return Environment(folder, program, program.parent)
    found = sorted(folder.glob(f"node_modules/{client.command}"))  # of the platform: npm chooses among its packages
    if not found:
        raise InstallError(f"npm installed no {client.command}; the client has no program for this platform")
    return Environment(folder, Path(sys.executable), found[0].parent)


def _install_python(client: Client, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--no-deps", "--no-compile", "--requirement", str(client.requirements)])
    if client.is_whole:
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
