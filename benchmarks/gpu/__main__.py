"""`python -m benchmarks.gpu check|kernels|speed|overlap|placement|served`: kernels and CUDA graphs on a GPU.

Each part prints a table and saves its figures in `benchmarks/results`. All but check and kernels need specray's
requirements to run, all need them to save, and none needs Ray or a network.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import torch

from benchmarks.gpu.report import Cell, Report
from specray.tables import format_table

PARTS = {
    "check": "checks",
    "kernels": "kernels",
    "speed": "speed",
    "overlap": "overlap",
    "placement": "placement",
    "served": "served",
}  # and their modules
ON_A_CPU = "TRITON_INTERPRET=1 in the environment, --device cpu and --tiny"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    help_of_part = (
        "check: is every kernel right? kernels: how fast is it? speed: of decode steps; overlap: with two plans in "
        "flight; placement: with the drafter in other processes; served: through the router's channel"
    )
    parser.add_argument("part", choices=PARTS, help=help_of_part)
    parser.add_argument("--device", default="cuda", help="cpu needs TRITON_INTERPRET=1 (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the program; saves nothing")
    parser.add_argument("--machine", metavar="NAME", help="name in benchmarks/results (default: the GPU's)")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"torch finds no GPU here; run it on a machine with one, or test it with {ON_A_CPU}", file=sys.stderr)
        return 2
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print(f"on a CPU the kernels run in Triton's interpreter only; test this with {ON_A_CPU}", file=sys.stderr)
        return 2
    found: Report = import_module(f"benchmarks.gpu.{PARTS[options.part]}").report(device, options.tiny)
    print(format_table(found.headers, found.rows, found.num_text_columns))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    print(f"\n{name}, torch {torch.__version__}: {found.note}")
    if not options.tiny:
        save(options.machine, found.cells)
    return int(found.num_failed > 0)


def save(machine: str | None, cells: Sequence[Cell]) -> None:
    """Add the figures to today's file of this machine."""
    from benchmarks import results  # needs specray's requirements

    commit = results.commit_here()
    found = [results.Result(**cell._asdict(), commit=commit) for cell in cells]
    print(f"saved in {results.save(machine, found)}")


if __name__ == "__main__":
    sys.exit(main())
