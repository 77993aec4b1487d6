"""The files of a run: its checkpoint, log of metrics and plot. A killed process leaves files whole."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specray.bench.plots import can_plot
from specray.errors import ConfigError
from specray.models.weights import read_torch_file

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
PLOT = "plot.png"
NO_PLOT = "there will be no plot, because matplotlib is not installed; `pip install 'specray[train]'` brings it"


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
    """Remove what a killed run logged after its last checkpoint, which had seen `num_tokens`: training repeats it."""
    kept = [line for line in read_log(run) if line["tokens"] <= num_tokens]
    if (run / LOG).is_file():
        replace_text(run / LOG, "".join(json.dumps(line) + "\n" for line in kept))


def last_validation(run: Path) -> dict[str, Any] | None:
    """The newest line with validation metrics."""
    return next((line for line in reversed(read_log(run)) if line["validation"]), None)


def plot_run(run: Path) -> None:
    """Draw `plot.png` from the run's log, where matplotlib is installed."""
    points = [line for line in read_log(run) if line["validation"]]
    if points and can_plot():
        _draw(points, run / PLOT)


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


def _draw(points: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    millions = [point["tokens"] / 1e6 for point in points]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, label in (("accept_length", "chain"), ("accept_length_top4", "in the top 4")):
        left.plot(millions, [point["validation"][name] for point in points], marker=".", label=label)
    left.set(xlabel="million tokens seen", ylabel="estimated accept length", title="Accept length, held-out answers")
    for depth in range(len(points[0]["validation"]["conditional"])):
        shares = [point["validation"]["conditional"][depth] for point in points]
        right.plot(millions, shares, marker=".", label=f"depth {depth + 1}")
    right.set(xlabel="million tokens seen", ylabel="agreement", title="Top-1 token agrees, given all before did")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
