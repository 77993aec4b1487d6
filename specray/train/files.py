"""Files that a killed process leaves whole: with the old content or the new one."""

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def replace_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically, with the permissions that the umask gives any new file."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.unlink(missing_ok=True)  # of a killed process
    unfinished.touch()
    mode = unfinished.stat().st_mode
    save_file(tensors, unfinished)
    unfinished.chmod(mode)  # safetensors makes files that only their owner can read
    os.replace(unfinished, path)
