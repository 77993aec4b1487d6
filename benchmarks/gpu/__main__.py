"""`python -m benchmarks.gpu`: the report of a GPU, the most decisive parts first.

Each part runs in a process of its own, so that a crash or a hang ends only it, and writes what it found at once: its
table into a file of `--out`, its figures into `benchmarks/results`. Run the command again to go on: a part that this
commit has measured whole on this machine is not repeated. `--model tiny` tests the program, also without a GPU.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from benchmarks.gpu.part import Finding, add_options, arguments_of, machine_name
from benchmarks.gpu.report import Cell
from benchmarks.results import ROOT, commit_here
from specray.tables import format_table


class Part(NamedTuple):
    limit_s: float  # after which it is ended
    shows: str


ALONE = {
    "environment": Part(20, "versions, driver and MPS"),
    "check": Part(110, "correctness of every kernel"),
    "served": Part(170, "engine steps as they are served, through the router's channel"),
    "depths": Part(150, "the gain of chains of 1 to 7 drafts with 16 to 128 requests"),
    "placement": Part(110, "the drafter in other processes"),
    "speed": Part(100, "decode steps in graphs and without"),
    "kernels": Part(60, "the time of each kernel"),
}  # 12 minutes together
SERVERS = {
    "serve-plain": Part(300, "a server on Ray with a cold Triton cache, whose processes are killed"),
    "serve-inline-chain": Part(300, "with chains, drafted inline"),
    "serve-colocated-chain": Part(300, "drafted by a process of its own"),
    "serve-memory-chain": Part(300, "with MPS, hidden states and drafts in the GPU's memory"),
    "serve-inline-tree": Part(300, "with trees"),
    "serve-colocated-tree": Part(300, "with trees"),
}
PARTS = {
    **ALONE,
    "heads": Part(600, "EAGLE-2 beside EAGLE-3 and plain decoding on MT-bench; needs --target"),
    **SERVERS,
}
STOP_S = 45.0
GOAL_HEADERS = ["figure", "", "measured", "goal", "reached"]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here; test the program with --device cpu --model tiny", file=sys.stderr)
        return 2
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("on a CPU the kernels run in Triton's interpreter only; set TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    wanted = options.parts or [*ALONE, *(["heads"] if options.target else [])]
    deadline, failed, cells = time.monotonic() + 60 * options.minutes, [], list[Cell]()
    for name in wanted:
        path, measured_here = options.out / f"{name}.json", (commit_here().rstrip("+"), machine_name(device))
        found = Finding.read(path)
        if options.again or found is None or found[:2] != measured_here or not found.is_whole:
            path.unlink(missing_ok=True)
            limit_s = PARTS[name].limit_s if device.type == "cuda" else math.inf  # the interpreter takes long
            _run(name, arguments_of(options), min(limit_s, deadline - time.monotonic()))
            found = Finding.read(path)
        if found is None or found.report.num_failed or not found.is_whole:
            failed.append(name)
        cells += found.report.cells if found is not None else []
    print(f"\n{format_table(GOAL_HEADERS, [goal_row(cell) for cell in cells if cell.goal is not None], 2)}")
    if failed:
        print(
            f"\nnot measured whole, or with failed checks: {', '.join(failed)}; run it again to go on", file=sys.stderr
        )
    return int(bool(failed))


def goal_row(cell: Cell) -> list[str]:
    """A row of the table of goals."""
    assert cell.goal is not None
    goal = f"{'<=' if cell.at_most else '>='} {cell.form.format(cell.goal)}"
    name = f"{cell.table}: {cell.row}"
    return [name, cell.column, cell.form.format(cell.value), goal, "yes" if cell.is_reached else "no"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog="parts: " + "; ".join(f"{name}: {part.shows}" for name, part in PARTS.items()),
    )
    parser.add_argument(
        "--parts",
        type=_parts,
        metavar="A,B,…",
        help=f"only these, in this order; `servers` are those on Ray (default: {','.join(ALONE)})",
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="stop after so many minutes (default: %(default)g)")
    parser.add_argument("--again", action="store_true", help="measure parts again that were measured already")
    add_options(parser)
    return parser


def _parts(text: str) -> list[str]:
    names = [name for each in text.split(",") for name in (SERVERS if each == "servers" else [each])]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from servers, {', '.join(PARTS)}")
    return names


def _run(name: str, arguments: list[str], limit_s: float) -> None:
    """Run a part; end it and its processes after `limit_s` seconds."""
    if limit_s <= 0:
        print(f"{name}: no time is left", flush=True)
        return
    print(f"\n== {name}: {PARTS[name].shows}", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu.part", name, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {limit_s:.0f} s", file=sys.stderr, flush=True)
        process.terminate()  # it stops its servers, which are not of its process group
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
