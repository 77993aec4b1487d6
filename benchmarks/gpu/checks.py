"""The part `check`: kernels against float64, and one result wherever a token is computed."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.cases import EPS, SHAPES, TINY, Shape, Tokens, kernel_cases
from benchmarks.gpu.report import Cell, Order, Report
from specray.ops.gpu import layers
from specray.ops.gpu.few_rows import GpuMatrix
from specray.ops.gpu.matrix import TiledMatrix

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
NUM_CHECKS = 20  # of a model and type
HEADERS = ["model", "check", "type", "error", "passed"]


def report(order: Order) -> Report:
    shapes, context = ([TINY], 80) if order.is_tiny else (SHAPES, 1500)
    found = list(order.time_limit.in_time(row for shape in shapes for row in check(shape, order.device, context)))
    num_passed = sum(row["passed"] == "yes" for row in found)
    note = f"{num_passed} of {len(found)} checks passed"  # which are not all if the time was over
    cell = Cell(
        "Checks",
        "kernels against float64, passed",
        "measured",
        num_passed / (NUM_CHECKS * len(TOLERANCE) * len(shapes)),
        "{:.0%}",
        1.0,
    )
    rows = [[row[name] for name in HEADERS] for row in found]
    return Report(HEADERS, rows, 3, note, [cell], len(found) - num_passed)


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
    tokens, last, chunk = Tokens(shape, context, dtype, device), 6, min(40, context // 8)
    alone = torch.cat([tokens.attend(position, position + 1) for position in range(context - chunk, context)])
    whole, split = (tokens.attend(context - 1, context, splits=splits) for splits in (False, True))
    yield "chunks split among programs", torch.equal(whole, split)
    yield "in a batch of 33", torch.equal(tokens.attend(context - 1, context, batch_size=33), alone[-1:])
    yield "on the path of a tree", torch.equal(tokens.attend_path(context - last), alone[-last:])
    yield "in a chunk of a prompt", torch.equal(tokens.attend(context - chunk, context), alone)
    x, weight = torch.randn(200, shape.hidden, device=device).to(dtype), torch.randn(70, shape.hidden, device=device)
    residual, of_norm = x.flip(0), weight[0].to(dtype)
    normed = layers.rms_norm(x + residual, of_norm, EPS)
    yield "add and norm in one launch", torch.equal(layers.add_rms_norm(x.clone(), residual, of_norm, EPS), normed)
    product = TiledMatrix(weight.to(dtype))
    yield "a product among 200 rows", torch.equal(product(x)[150:151], product(x[150:151]))
    few_rows = GpuMatrix(weight.to(dtype))
    yield "a product among 8 rows", torch.equal(few_rows(x[:8])[5:6], few_rows(x[5:6])) or not few_rows.is_fit


def _row(shape: Shape, name: str, kind: str, error: str, passed: bool) -> dict[str, Any]:
    return {"model": shape.name, "check": name, "type": kind, "error": error, "passed": "yes" if passed else "NO"}
