"""Linear layers without quantization, in every type that a user can choose."""

import pytest
import torch

from specray.ops.linear import make_linear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_linear_runs_in_any_type_on_this_cpu(dtype: torch.dtype, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((5, 64), (48, 64), (48,)))
    y = make_linear(weight, bias if has_bias else None)(x)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert y.dtype is dtype
    assert torch.allclose(y.double(), expected, rtol=0.01, atol=0.05)
