"""Products with weights as checkpoints store them, in Triton's interpreter, against float64 of the expanded weights."""

from itertools import cycle

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specray.ops.gpu.matrix import FEW_ROWS, MANY_ROWS, TiledMatrix
from specray.ops.linear import fixed_order, is_row_wise, make_gated, make_linear
from tests.support.coded import FORMATS, weight_of

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def check(y: Tensor, expected: Tensor, dtype: torch.dtype, ins: int) -> None:
    assert y.dtype is dtype
    torch.testing.assert_close(
        y.double(), expected, atol=float(TOLERANCE[dtype] * ins**0.5 * expected.abs().max()), rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str, dtype: torch.dtype) -> None:
    """Of each format and type nine cases: every pair of a size, a number of rows, and an order with or without bias."""
    orders = cycle((False, True))
    for outs, ins in ((7, 64), (70, 160), (64, 256)):
        weight, bias = weight_of(name, outs, ins), torch.randn(outs).to(dtype)
        exact = weight.float().double().t()
        for rows in (1, 3, FEW_ROWS + 1):
            x, fixed = torch.randn(rows, ins).to(dtype), next(orders)
            y = TiledMatrix(weight, bias if fixed else None, fixed)(x)
            check(y, x.double() @ exact + (bias.double() if fixed else 0.0), dtype, ins)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_others(name: str) -> None:
    matrix = TiledMatrix(weight_of(name, 70, 128), None, in_fixed_order=True)
    x = torch.randn(MANY_ROWS + 3, 128).bfloat16()
    together = matrix(x)
    for row in (0, 5, MANY_ROWS + 2):
        assert torch.equal(matrix(x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("name", ["fp8 channels", "int8 channels"])
def test_inputs_and_outputs_of_any_number(name: str) -> None:
    for outs, ins in ((1, 1), (33, 33), (5, 70)):
        weight, x = weight_of(name, outs, ins), torch.randn(2, ins)
        check(
            TiledMatrix(weight, None, in_fixed_order=False)(x),
            x.double() @ weight.float().double().t(),
            x.dtype,
            ins,
        )
    assert TiledMatrix(weight, None, in_fixed_order=False)(torch.empty(0, 70)).shape == (0, 5)


def test_linear_layers_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAY_KERNELS", "triton")
    weight, x = weight_of("awq", 24, 64), torch.randn(3, 64)
    plain = make_linear(weight), make_gated(weight, weight)
    with fixed_order(enabled=True):
        fixed = make_linear(weight), make_gated(weight, weight)
    assert isinstance(plain[0], TiledMatrix)
    assert [is_row_wise(run) for run in (*plain, *fixed)] == [False, False, True, True]
    once = x @ weight.float().t()
    torch.testing.assert_close(plain[1](x), torch.nn.functional.silu(once) * once, rtol=1e-4, atol=1e-4)
