"""fp8 products of a GPU. tests/unit/ops/test_quantization.py emulates the product on a CPU."""

import torch

from specray.ops.linear import make_linear
from tests.support.needs_gpu import NEEDS_GPU
from tests.unit.ops.test_quantization import problem, relative_error

pytestmark = NEEDS_GPU


def test_the_error_of_fp8_is_below_6_percent() -> None:
    x, weight, bias = (tensor.to("cuda", torch.bfloat16) for tensor in problem())
    y = make_linear(weight, bias, "fp8")(x)
    exact = x.double() @ weight.double().T + bias.double()
    assert all(relative_error(result, expected) < 0.06 for result, expected in zip(y, exact, strict=True))
