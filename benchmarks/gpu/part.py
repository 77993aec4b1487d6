"""One part of the report, which `python -m benchmarks.gpu` runs in a process of its own.

Prints its table, and writes it at once. A part that is ended by SIGTERM prints and writes what it has measured.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Self

import torch

from benchmarks import results
from benchmarks.gpu.report import Cell, Checkpoints, Order, Report, TimeLimit
from specray.tables import format_table

MODULES = {"check": "checks"}  # of parts that are not named like their module; "serve-…" are those of `served_on_ray`


class Finding(NamedTuple):
    """A part's report, where and by what it was made."""

    commit: str
    machine: str
    report: Report
    is_whole: bool = True  # False: its time was over

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None if there is no such file, or not a whole one."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            report = found["report"]
            cells = [Cell(**cell) for cell in report.pop("cells")]
            return cls(found["commit"], found["machine"], Report(**report, cells=cells), found["is_whole"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        report = self.report._asdict() | {"cells": [cell._asdict() for cell in self.report.cells]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._asdict() | {"report": report}, indent=1) + "\n", encoding="utf-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that all parts have."""
    add = parser.add_argument
    add("--device", default="cuda", help="cpu needs TRITON_INTERPRET=1 (default: %(default)s)")
    add("--model", choices=("8b", "tiny"), default="8b", help="random weights of this size (default: %(default)s)")
    add("--machine", metavar="NAME", help="name in benchmarks/results (default: the GPU's)")
    add(
        "--out",
        type=Path,
        default=results.ROOT / "build" / "gpu-report",
        metavar="FOLDER",
        help="each part's table (default: build/gpu-report)",
    )
    add("--target", metavar="MODEL", help="a checkpoint for the part `heads`, with the heads below")
    add("--eagle2", metavar="MODEL", help="its EAGLE-2 head")
    add("--eagle3", metavar="MODEL", help="its EAGLE-3 head")
    add("--mt-bench", type=Path, metavar="FILE", help="MT-bench's questions (default: built-in prompts)")


def arguments_of(options: argparse.Namespace) -> list[str]:
    """The command line of these options."""
    names = ("device", "model", "machine", "out", "target", "eagle2", "eagle3", "mt_bench")
    given = {name.replace("_", "-"): value for name in names if (value := getattr(options, name)) is not None}
    return [f"--{name}={value}" for name, value in given.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part", description=__doc__)
    parser.add_argument("name")
    add_options(parser)
    before = signal.getsignal(signal.SIGTERM)
    try:
        return _measure(parser.parse_args(argv))
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(options: argparse.Namespace) -> int:
    """The process's status."""
    name, device, is_tiny = options.name, torch.device(options.device), options.model == "tiny"
    checkpoints = None
    if options.target is not None:
        checkpoints = Checkpoints(options.target, options.eagle2, options.eagle3, options.mt_bench)
    module = "served_on_ray" if name.startswith("serve-") else MODULES.get(name, name)
    time_limit = TimeLimit()
    order = Order(name, device, is_tiny, options.out, time_limit, checkpoints)
    time_limit.watch()
    found: Report = import_module(f"benchmarks.gpu.{module}").report(order)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what follows takes less time than the caller waits after it
    is_whole = not time_limit.is_over
    print(format_table(found.headers, found.rows, found.num_text_columns))
    ending = "" if is_whole else "OUT OF TIME, not all was measured; "
    print(f"\n{name}: {ending}{found.note}; {machine_name(device)}, torch {torch.__version__}", flush=True)
    commit = results.commit_here()
    Finding(commit.rstrip("+"), machine_name(device), found, is_whole).write(options.out / f"{name}.json")
    if not is_tiny:
        cells = [results.Result(**cell._asdict(), commit=commit) for cell in found.cells]
        print(f"saved in {results.save(options.machine, cells)}")
    return int(found.num_failed > 0 or not is_whole)


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"


if __name__ == "__main__":
    sys.exit(main())
