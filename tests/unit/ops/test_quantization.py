"""Quantized linear layers: accuracy, results independent of the batch, and refusal of unsupported devices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, RowParallelLinear, VocabHead
from specray.layers.parallel import RankGroup
from specray.ops.cpu.library import kernels
from specray.ops.linear import make_linear
from specray.ops.quantization import check_quantization, quantization_of_choice

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TYPES = [torch.float32, torch.bfloat16]


def problem(rows: int = 16, inputs: int = 96, outputs: int = 80) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, bias) in float32, with rows and channels of very different magnitudes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-2, 1, outputs)[:, None]
    return x, weight, torch.randn(outputs, generator=generator)


def relative_error(result: Tensor, exact: Tensor) -> Tensor:
    """Norm of the error, divided by the norm of `exact`."""
    return (result.double() - exact).norm() / exact.norm()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_error_of_each_row_is_small(has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = (tensor.to(dtype) for tensor in problem())
    linear = make_linear(weight, bias if has_bias else None, "int8")
    y = linear(x)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert y.dtype == dtype
    assert all(relative_error(result, expected) < 0.02 for result, expected in zip(y, exact, strict=True))


def test_channels_of_different_magnitudes_keep_their_precision() -> None:
    x, weight, _ = problem()
    x /= x.norm(dim=-1, keepdim=True)
    y, exact = make_linear(weight, quantization="int8")(x), x.double() @ weight.double().T
    assert all(relative_error(result, expected) < 0.03 for result, expected in zip(y.T, exact.T, strict=True))


@pytest.mark.skipif(kernels() is None, reason="torch's operations do not promise this")
@pytest.mark.parametrize("dtype", TYPES)
def test_a_rows_result_is_bitwise_independent_of_the_batch(dtype: torch.dtype) -> None:
    x, weight, bias = (tensor.to(dtype) for tensor in problem(rows=33, inputs=576, outputs=192))
    linear = make_linear(weight, bias, "int8")
    together = linear(x)
    assert torch.equal(torch.cat([linear(row[None]) for row in x]), together)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x[order]), together[order])


def test_a_non_finite_row_stays_non_finite_and_does_not_change_others() -> None:
    x, weight, _ = problem(rows=4)
    linear = make_linear(weight, quantization="int8")
    expected = linear(x)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    y = linear(x)
    assert not y[1].isfinite().any()
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 3]], expected[[0, 3]])


def test_rows_and_channels_of_zeros_give_zeros() -> None:
    x, weight, _ = problem(rows=3)
    x[1], weight[7] = 0.0, 0.0
    y = make_linear(weight, quantization="int8")(x)
    assert not y[1].any()
    assert not y[:, 7].any()


class RankWithoutReduction(RankGroup):
    """A rank that returns its partial sums."""

    def __init__(self) -> None:
        super().__init__()
        self.leads = False

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor


def test_column_parallel_equals_one_rank_and_row_parallel_is_close() -> None:
    x, weight, _ = problem()
    whole = ColumnParallelLinear(weight, quantization="int8")(x)
    columns = [ColumnParallelLinear(part, quantization="int8")(x) for part in weight.chunk(2)]
    assert torch.equal(torch.cat(columns, 1), whole)
    halves = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    rows = [
        RowParallelLinear(part.contiguous(), RankWithoutReduction(), quantization="int8")(inputs)
        for inputs, part in halves
    ]
    assert relative_error(sum(rows, torch.zeros(())), x.double() @ weight.double().T) < 0.02
    assert torch.equal(VocabHead(weight, 70, RankGroup(), "int8")(x), whole[:, :70])


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [("fp8", CPU, "int8"), ("int8", CUDA, "fp8"), ("int3", CPU, "int8, int4, auto, fp8")],
)
def test_a_quantization_without_a_kernel_is_refused_with_the_alternative(
    name: str, device: torch.device, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_quantization(name, device, torch.bfloat16)


def test_the_default_quantization_is_supported() -> None:
    assert quantization_of_choice(CUDA) is None
    check_quantization(quantization_of_choice(CPU), CPU, torch.float32)


def fp8_target() -> EngineConfig:
    return EngineConfig(device="cpu", quantization="fp8")


def int8_target_on_a_gpu() -> EngineConfig:
    return EngineConfig(device="cuda", quantization="int8")


def fp8_draft() -> EngineConfig:
    return EngineConfig(device="cpu", speculative=SpeculativeConfig(algorithm="NGRAM", draft_model_quantization="fp8"))


@pytest.mark.parametrize("build", [fp8_target, int8_target_on_a_gpu, fp8_draft])
def test_a_configuration_for_the_wrong_device_is_refused(build: Callable[[], EngineConfig]) -> None:
    with pytest.raises(ValueError, match="has kernels for"):
        build()


def test_fp8_is_refused_with_a_type_that_it_does_not_multiply() -> None:
    with pytest.raises(ValueError, match="fp8 works only with bfloat16, not dtype=float16"):
        EngineConfig(quantization="fp8", dtype="float16")
    assert EngineConfig(quantization="fp8", dtype="bfloat16").quantization == "fp8"


@pytest.mark.parametrize(("outs", "ins"), [(32, 48), (33, 48), (32, 50), (7, 5)])
def test_fp8_pads_sizes_that_the_kernel_does_not_take(outs: int, ins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product itself is emulated: it runs on GPUs only, and fails for sizes that are not multiples of 16."""

    def scaled_mm(a: Tensor, b: Tensor, unit: Tensor, scale: Tensor, bias: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.shape[1] % 16 == 0
        assert b.shape[1] % 16 == 0
        assert (a.dtype, b.dtype, b.stride(0)) == (torch.float8_e4m3fn, torch.float8_e4m3fn, 1)
        return ((a.float() * unit) @ (b.float() * scale) + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size).bfloat16() for size in ((3, ins), (outs, ins), (outs,)))
    y = make_linear(weight, bias, "fp8")(x)
    exact = x.double() @ weight.double().T + bias.double()
    assert y.shape == exact.shape
    assert relative_error(y, exact) < 0.06
