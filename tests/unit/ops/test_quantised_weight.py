"""Products with weights as checkpoints store them, on this CPU. tests/unit/ops/test_gpu_quantised.py has Triton's."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from specray.ops.cpu.library import kernels
from specray.ops.linear import is_row_wise, make_gated, make_linear
from specray.ops.quantised_weight import E2M1, E4M3, INT4, INT8, Code, QuantisedWeight, joined
from tests.support.coded import coded

CODES = {code.name: code for code in (E4M3, E2M1, INT8, INT4)}
SIZES = [(64, 64), (64, 16), (128, 32), (96, 64), (33, 33), (40, 16)]  # inputs, and those that share a scale
SCALES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "e8m0": torch.uint8}


def weights(code: Code) -> Iterator[QuantisedWeight]:
    for (ins, group), dtype, has_zeros in product(SIZES, SCALES.values(), (False, True)):
        if not (has_zeros and code.zero is None):
            yield coded(code, 37, ins, group, dtype, has_zeros)


@pytest.mark.skipif(kernels() is None, reason="torch's sums depend on the number of rows")
@pytest.mark.parametrize("name", CODES)
def test_products_have_the_bits_of_the_expanded_weights(name: str) -> None:
    for weight in weights(CODES[name]):
        run, x = make_linear(weight), torch.randn(7, weight.ins)
        expected = make_linear(weight.float())(x)
        assert is_row_wise(run)
        assert all(torch.equal(run(x[:count]), expected[:count]) for count in (1, 2, 4, 7)), weight
        half = x.bfloat16()
        assert torch.equal(run(half), make_linear(weight.float())(half.float()).bfloat16())


@pytest.mark.skipif(kernels() is None, reason="torch's sums depend on the number of rows")
@pytest.mark.parametrize("name", ["e2m1", "int8", "int4"])
def test_models_of_16_bits_round_activations_to_16_bits(name: str) -> None:
    for weight in weights(CODES[name]):
        run, x = make_linear(weight.to(weight.device, torch.bfloat16)), torch.randn(7, weight.ins)
        y, exact = run(x), x.double() @ weight.float().double().t()
        assert not torch.equal(y, make_linear(weight)(x)) or weight.group % 32
        step = x.abs().max() / 2**15
        assert ((y.double() - exact).abs() <= step * weight.float().abs().sum(1)).all(), weight
        assert all(torch.equal(run(x[:count]), y[:count]) for count in (1, 2, 4)), weight


@pytest.mark.skipif(kernels() is None, reason="torch's sums depend on the number of rows")
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_models_of_16_bits_scale_the_sums_of_fp8(size: float) -> None:
    for weight in weights(E4M3):
        run, x = make_linear(weight.to(weight.device, torch.bfloat16)), size * torch.randn(13, weight.ins)
        y, exact = run(x), x.double() @ weight.float().double().t()
        assert not torch.equal(y, make_linear(weight)(x))
        assert ((y.double() - exact).abs() <= 2**-20 * (x.abs() @ weight.float().abs().t())).all(), weight
        assert all(torch.equal(run(x[:count]), y[:count]) for count in range(1, 13)), weight


@pytest.mark.parametrize("name", CODES)
def test_products_are_those_of_float64(name: str) -> None:
    for weight in weights(CODES[name]):
        x, bias = torch.randn(3, weight.ins), torch.randn(37)
        exact = x.double() @ weight.float().double().t()
        torch.testing.assert_close(make_linear(weight, bias)(x).double(), exact + bias.double(), rtol=1e-5, atol=1e-2)
        gated = make_gated(weight, weight)(x)
        torch.testing.assert_close(gated.double(), torch.nn.functional.silu(exact) * exact, rtol=1e-4, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CODES)
def test_every_code_stands_for_its_number(name: str, dtype: torch.dtype) -> None:
    """By the identity matrix, and from the definitions of the formats."""
    code = CODES[name]
    wide = 256 if code.bits == 8 else 16
    numbers = torch.arange(wide, dtype=torch.uint8)
    codes = numbers if code.bits == 8 else numbers[::2] | numbers[1::2] << 4
    weight = QuantisedWeight(code, wide, wide, codes[None].contiguous(), torch.ones(1, 1), dtype=dtype)
    expected = torch.tensor([_number(code, place) for place in range(wide)])
    assert torch.equal(weight.float()[0][: len(expected)].nan_to_num(480.0), expected.nan_to_num(480.0))
    products = make_linear(weight)(torch.eye(wide))[:, 0]
    is_number = expected.isfinite()
    assert torch.equal(products[is_number], expected[is_number]) or kernels() is None


def _number(code: Code, place: int) -> float:
    if code.zero is not None:
        return float(place - code.zero)
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if code == E4M3 else (2, 1, 1)
    sign = -1.0 if place >> (exponent_bits + mantissa_bits) else 1.0
    exponent, mantissa = place >> mantissa_bits & (1 << exponent_bits) - 1, place & (1 << mantissa_bits) - 1
    if code == E4M3 and exponent == 15 and mantissa == 7:
        return float("nan")
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)


def test_matrices_with_different_groups_scales_and_zeros_are_joined() -> None:
    parts = [
        coded(INT4, 8, 96, 32, torch.float16, has_zeros=True),
        coded(INT4, 5, 96, 48, torch.bfloat16, has_zeros=False),
        coded(INT4, 3, 96, 96, torch.float16, has_zeros=False),
    ]
    both = joined(parts)
    assert both.group == 16
    assert torch.equal(both.float(), torch.cat([part.float() for part in parts]))


def test_large_scales_of_fp8_are_exact() -> None:
    weight = coded(E4M3, 16, 32, 32)
    large = QuantisedWeight(E4M3, 32, 32, weight.codes, torch.full((16, 1), 1000.0))
    x = torch.randn(2, 32)
    torch.testing.assert_close(make_linear(large)(x), x @ large.float().t(), rtol=1e-4, atol=1.0)
    gated = make_gated(weight, large)(x)
    assert gated.isfinite().all()
