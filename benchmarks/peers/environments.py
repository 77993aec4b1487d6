"""Makes a virtual environment for each peer with pip, on first use."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.engines import Peer

INSTALLED = ".installed"


class InstallError(Exception):
    """A peer cannot be installed here; the message says why in one line."""


def python_of(peer: Peer, folder: Path, torch_args: Sequence[str], say: Callable[[str], None]) -> Path:
    """The Python of the peer's environment under `folder`, made if it is not there. Raises InstallError."""
    if not peer.requirements:
        return Path(sys.executable)
    target = folder / peer.folder
    python, marker = target / "bin" / "python", target / INSTALLED
    recipe = _recipe(peer)
    if marker.is_file() and marker.read_text(encoding="utf-8") == recipe:
        return python
    say(f"installing {peer.name} in {target}: once, some minutes")
    shutil.rmtree(target, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(target)])
    for arguments in _pip_commands(peer, torch_args):
        say(f"  pip {' '.join(arguments)}")
        _run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments])
    marker.write_text(recipe, encoding="utf-8")
    return python


def reason_of(output: str) -> str:
    """pip's first error in `output`, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["no output"])[0].removeprefix("ERROR:").strip()


def _recipe(peer: Peer) -> str:
    return "\n".join(" ".join(arguments) for arguments in _pip_commands(peer, ()))


def _pip_commands(peer: Peer, torch_args: Sequence[str]) -> list[list[str]]:
    first = [["install", *torch_args, peer.torch]] if peer.torch else []
    kept = [peer.torch] if peer.torch else []  # named again, so that nothing replaces it
    last = [["uninstall", "--yes", *peer.removed]] if peer.removed else []
    return [*first, ["install", *kept, *peer.requirements], *last]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise InstallError(reason_of(result.stdout + result.stderr))
