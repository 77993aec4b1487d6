"""x W^T + b with quantised weights and activations: int8 on CPU, fp8 on GPUs.

A weight has one scale for each output channel, set when it is packed; activations have one for each row, set in each
call. A row's result therefore does not depend on other rows; with int8, whose products are summed as integers, it is
bit-identical alone and in any batch. Quantisation is symmetric and needs no calibration. Only linear layers are
quantised.

int8 runs on fbgemm, chosen by measurement. The table has the matmuls of all layers of SmolLM2-135M and, in the last
columns, of its output head, with quantisation, in milliseconds of one thread's CPU time, best of ten on a busy
AVX512-VNNI machine. oneDNN has only a reference kernel for signed activations, a thousand times slower, so it gets
unsigned ones.

| kernel (torch 2.13) | rows: 1 | 4 | 8 | 16 | 32 | head: 1 | 8 | 32 |
|---|---|---|---|---|---|---|---|---|
| bfloat16 | 19.2 | 16.6 | 21.1 | 26.4 | 41.2 | 3.9 | 4.2 | 10.0 |
| fbgemm, a scale per row (this) | 14.6 | 18.9 | 21.7 | 31.9 | 39.6 | 1.9 | 3.1 | 8.0 |
| fbgemm, one scale for all rows: results depend on other rows | 13.1 | 14.6 | 18.8 | 26.3 | 41.6 | 1.5 | 3.0 | 9.5 |
| oneDNN qlinear_pointwise | 20.7 | 22.5 | 29.3 | 39.3 | 52.5 | 2.9 | 3.5 | 7.2 |
| _int_mm | 30.0 | 27.2 | 35.3 | 42.7 | 70.8 | 4.5 | 5.5 | 11.8 |
| _weight_int8pack_mm, activations as they are | 17.3 | 23.7 | 36.7 | 61.2 | 113.0 | 5.6 | 12.9 | 52.1 |
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specray.errors import ConfigError

Linear = Callable[[Tensor], Tensor]

_SMALLEST = 1e-30  # smallest scale, for rows of zeros


def make_int8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Function of x [T, in] -> [T, out], of x's type, for `weight` [out, in] of any type.

    Rows that are not finite stay not finite.
    """
    levels, packed = activation_levels(), _pack(weight.float())
    smallest, addend = torch.tensor(_SMALLEST), None if bias is None else bias.float()
    run = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def linear(x: Tensor) -> Tensor:
        rows = x.float()
        unit = torch.add(smallest, rows.abs().amax(-1, keepdim=True), alpha=1 / levels)
        y = run(rows / unit, 1.0, levels + 1, packed)  # rounds to integers of one byte, with the zero at levels + 1
        y = y.mul_(unit) if addend is None else torch.addcmul(addend, y, unit)
        return y.to(x.dtype)

    return linear


def make_fp8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Like `make_int8_linear`, in float8_e4m3fn on tensor cores; x is bfloat16. Not run on a GPU yet."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = weight.float().abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST) / largest
    packed = (weight / scale).to(torch.float8_e4m3fn).t()  # column-major, as the kernel requires

    def linear(x: Tensor) -> Tensor:
        unit = x.float().abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST) / largest
        rows = (x / unit).clamp_(-largest, largest).to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, packed, unit, scale.t(), bias, out_dtype=torch.bfloat16)

    return linear


def check_quantization(name: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError if `device` does not support this quantization for activations of `dtype`."""
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise ConfigError(f"quantization={name!r} is not known; choose one of {', '.join(QUANTIZATIONS)}, or null")
    if reason := QUANTIZATIONS[name].obstacle(device, dtype):
        raise ConfigError(f"quantization={name} does not work here: {reason}")


def quantization_of_choice(device: torch.device, dtype: torch.dtype) -> str | None:
    """The quantization for weights that affect only speed, such as a drafter's: int8 where it runs, else none."""
    return None if QUANTIZATIONS["int8"].obstacle(device, dtype) else "int8"


def _pack(weight: Tensor) -> object:
    """A float32 weight [out, in] in fbgemm's layout, each output channel rounded to 127 levels on each side of zero."""
    scales = weight.abs().amax(-1).clamp_(min=_SMALLEST).double() / 127
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the deprecation concerns quantized tensors, not this kernel
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        packed: object = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def activation_levels() -> int:
    """Levels of an activation on each side of zero: half as many where pairs of products are added in 16 bits."""
    return 127 if torch.cpu._is_vnni_supported() else 63


def _int8_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG001
    if device.type != "cpu":
        return f"its kernels run on CPU, and the device is {device.type}; set quantization: fp8 or null"
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return f"torch has no fbgemm on this CPU ({torch.backends.quantized.engine} instead); set quantization: null"
    return None


def _fp8_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"its kernels run on GPUs, and the device is {device.type}; set quantization: int8 or null"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "it needs a GPU of compute capability 8.9 (Ada, Hopper) or later; set quantization: null"
    return None if dtype is torch.bfloat16 else f"it works only with bfloat16, not {dtype}; set dtype: bfloat16"


class Quantization(NamedTuple):
    """How a linear is made, and the reason if a device does not support it."""

    make: Callable[[Tensor, Tensor | None], Linear]
    obstacle: Callable[[torch.device, torch.dtype], str | None]


QUANTIZATIONS = {
    "int8": Quantization(make_int8_linear, _int8_obstacle),
    "fp8": Quantization(make_fp8_linear, _fp8_obstacle),
}
