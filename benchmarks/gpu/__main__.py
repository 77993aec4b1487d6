"""`python -m benchmarks.gpu check|kernels|speed|overlap|placement`: kernels and CUDA graphs on a GPU.

check: kernels against float64, and one result wherever a token is computed. The others are the modules of these names;
all but check and kernels need specray's requirements, and none needs Ray or a network.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import SHAPES, TINY, Shape, Tokens, kernel_cases
from specray.ops.gpu.few_rows import GpuMatrix
from specray.ops.gpu.matrix import FixedOrderMatrix
from specray.tables import format_table

ON_A_CPU = "TRITON_INTERPRET=1 in the environment, --device cpu and --tiny"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    help_of_part = (
        "check: is every kernel right? kernels: how fast is it? speed: of decode steps; overlap: with two plans in "
        "flight; placement: with the drafter in other processes"
    )
    parser.add_argument("part", choices=["check", *PARTS], help=help_of_part)
    parser.add_argument("--device", default="cuda", help="cpu needs TRITON_INTERPRET=1 (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the program without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"torch finds no GPU here; run it on a machine with one, or test it with {ON_A_CPU}", file=sys.stderr)
        return 2
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print(f"on a CPU the kernels run in Triton's interpreter only; test this with {ON_A_CPU}", file=sys.stderr)
        return 2
    if options.part != "check":
        return PARTS[options.part](device, options.tiny, options.json)
    shapes, context = ([TINY], 80) if options.tiny else (SHAPES, 1500)
    found = [row for shape in shapes for row in check(shape, device, context)]
    headers = ["model", "check", "type", "error", "passed"]
    print(format_table(headers, [[row[name] for name in headers] for row in found], num_text_columns=3))
    failed = sum(row["passed"] != "yes" for row in found)
    print(f"\n{_machine(device)}: {len(found) - failed} of {len(found)} checks passed")
    if options.json:
        options.json.write_text(json.dumps({"machine": _machine(device), "checks": found}, indent=2) + "\n")
    return int(failed > 0)


def speed(device: torch.device, is_tiny: bool, file: Path | None) -> int:
    from benchmarks.gpu import speed as part
    from benchmarks.gpu.random_model import LLAMA_8B
    from benchmarks.gpu.random_model import TINY as TINY_MODEL

    size, variants, batch_sizes, steps, prompt = LLAMA_8B, part.VARIANTS, part.BATCH_SIZES, 100, 128
    if is_tiny:
        size, variants, batch_sizes, steps, prompt = TINY_MODEL, part.TINY_VARIANTS, (1, 2), 3, 8
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for each in part.measure(Path(folder), size, device, variants, batch_sizes, steps, prompt):
            found.append(each)
            print(", ".join(part.table_rows([each])[0]), flush=True)  # minutes pass before the table
    print(f"\n{format_table(part.HEADERS, part.table_rows(found))}")
    print(f"\n{_machine(device)}, {size.name}, prompts of {prompt} tokens, {steps} steps; goals are for an H200")
    if file:
        report = {"machine": _machine(device), "model": size.name, "speeds": [part.to_json(each) for each in found]}
        file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def kernels(device: torch.device, is_tiny: bool, file: Path | None) -> int:
    from benchmarks.gpu import kernels as part

    shape, sizes = (TINY, part.SMALL) if is_tiny else (SHAPES[0], part.FULL)
    found = list(part.measure(shape, sizes, device))
    print(format_table(part.HEADERS, part.table_rows(found)))
    print(f"\n{_machine(device)}, {shape.name}, bfloat16")
    if file:
        report = {"machine": _machine(device), "model": shape.name, "kernels": [each._asdict() for each in found]}
        file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def overlap(device: torch.device, is_tiny: bool, file: Path | None) -> int:
    from benchmarks.gpu import overlap as part

    setting = part.TINY if is_tiny else part.FULL
    with tempfile.TemporaryDirectory() as folder:
        found = list(part.measure(Path(folder), setting, device))
    return _report(part.HEADERS, part.table_rows(found), "overlaps", [each._asdict() for each in found], device, file)


def placement(device: torch.device, is_tiny: bool, file: Path | None) -> int:
    from benchmarks.gpu import placement as part

    setting = part.TINY if is_tiny else part.FULL
    with tempfile.TemporaryDirectory() as folder:
        found = list(part.measure(Path(folder), setting, device))
    return _report(part.HEADERS, part.table_rows(found), "placements", [each._asdict() for each in found], device, file)


def _report(
    headers: list[str], rows: list[list[str]], name: str, found: list[Any], device: torch.device, file: Path | None
) -> int:
    print(format_table(headers, rows))
    print(f"\n{_machine(device)}")
    if file:
        file.write_text(json.dumps({"machine": _machine(device), name: found}, indent=2) + "\n")
    return 0


PARTS: dict[str, Callable[[torch.device, bool, Path | None], int]] = {
    "kernels": kernels,
    "speed": speed,
    "overlap": overlap,
    "placement": placement,
}


def check(shape: Shape, device: torch.device, context: int) -> Iterator[dict[str, Any]]:
    for dtype in TOLERANCE:
        kind = str(dtype).removeprefix("torch.")
        for case in kernel_cases(shape, dtype, device, context):
            seen, expected = case.run()
            scale = float(expected.abs().max()) or 1.0
            error = float((seen.double() - expected).abs().max()) / scale
            passed = error <= TOLERANCE[dtype]
            yield _row(shape, case.name, kind, f"{error:.1e}", passed)
        for name, is_same in same_bits(shape, dtype, device, context):
            yield _row(shape, f"same bits: {name}", kind, "", is_same)


def same_bits(shape: Shape, dtype: torch.dtype, device: torch.device, context: int) -> Iterator[tuple[str, bool]]:
    """A token alone against the same token in other surroundings."""
    tokens, last, chunk = Tokens(shape, context, dtype, device), 6, 40
    alone = torch.cat([tokens.attend(position, position + 1) for position in range(context - chunk, context)])
    whole, split = (tokens.attend(context - 1, context, splits=splits) for splits in (False, True))
    yield "chunks split among programs", torch.equal(whole, split)
    yield "in a batch of 33", torch.equal(tokens.attend(context - 1, context, batch_size=33), alone[-1:])
    yield "on the path of a tree", torch.equal(tokens.attend_path(context - last), alone[-last:])
    yield "in a chunk of a prompt", torch.equal(tokens.attend(context - chunk, context), alone)
    x, weight = torch.randn(200, shape.hidden, device=device).to(dtype), torch.randn(70, shape.hidden, device=device)
    product = FixedOrderMatrix(weight.to(dtype))
    yield "a product among 200 rows", torch.equal(product(x)[150:151], product(x[150:151]))
    few_rows = GpuMatrix(weight.to(dtype))
    yield "a product among 8 rows", torch.equal(few_rows(x[:8])[5:6], few_rows(x[5:6])) or not few_rows.is_fit


def _row(shape: Shape, name: str, kind: str, error: str, passed: bool) -> dict[str, Any]:
    return {"model": shape.name, "check": name, "type": kind, "error": error, "passed": "yes" if passed else "NO"}


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
