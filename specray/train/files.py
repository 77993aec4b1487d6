"""Text files that a killed process leaves whole: with the old content or the new one."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
