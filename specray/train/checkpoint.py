"""A run's checkpoint and its log of metrics."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from specray.errors import ConfigError
from specray.models.weights import read_torch_file
from specray.train.files import replace_text

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


def write_checkpoint(run: Path, content: dict[str, Any]) -> None:
    """Replace the run's checkpoint atomically."""
    unfinished = run / f".{CHECKPOINT}.tmp"
    torch.save(content, unfinished)
    os.replace(unfinished, run / CHECKPOINT)


def read_checkpoint(run: Path) -> dict[str, Any] | None:
    """The run's checkpoint, or None in a new run. ConfigError if the file is damaged."""
    path = run / CHECKPOINT
    if not path.is_file():
        return None
    content = read_torch_file(path, "delete it to start again")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a checkpoint; delete it to start again")
    return content


def append_log(run: Path, line: dict[str, Any]) -> None:
    with (run / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_log(run: Path) -> list[dict[str, Any]]:
    """The lines of the log, oldest first. The last one is left out if it was not written to its end."""
    path = run / LOG
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def cut_log(run: Path, num_tokens: int) -> None:
    """Remove what a killed run logged after its last checkpoint, which had seen `num_tokens`: it is learnt again."""
    kept = [line for line in read_log(run) if line["tokens"] <= num_tokens]
    if (run / LOG).is_file():
        replace_text(run / LOG, "".join(json.dumps(line) + "\n" for line in kept))


def last_validation(run: Path) -> dict[str, Any] | None:
    """The newest line with validation metrics."""
    return next((line for line in reversed(read_log(run)) if line["validation"]), None)
