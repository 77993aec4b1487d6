"""The quantizations of linear layers that an option asks for: int8 and int4 on CPUs, fp8 on GPUs.

`auto` keeps the blocks of a quantised GGUF file and rounds nothing else. What a checkpoint has quantised needs none of
them: `quantised_weight`.

Weights of int8 and int4 have a scale for each group of 32 inputs (`grouped_weight`). The kernels round activations to 8
bits in groups of 32 as well, and sum the products of a group as integers. Weights of fp8 have a scale for each output
channel, activations one for each row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.errors import ConfigError
from specray.ops.device_ops import ops_on
from specray.ops.grouped_weight import GroupedWeight, to_int4, to_int8
from specray.ops.torch_ops import TorchOps

_SMALLEST = 1e-30  # smallest scale, for rows of zeros
_FP8_MULTIPLE = 16  # of the sizes of a matrix that torch multiplies in fp8


def make_fp8_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Function of x [T, in] -> [T, out] in float8_e4m3fn on tensor cores; x is bfloat16."""
    outs, ins = weight.shape
    more_outs, more_ins = -outs % _FP8_MULTIPLE, -ins % _FP8_MULTIPLE
    weight, bias = F.pad(weight, (0, 0, 0, more_outs)), None if bias is None else F.pad(bias, (0, more_outs))
    quantise = ops_on(weight.device).quantise_rows
    packed, scale = TorchOps().quantise_rows(weight, ins + more_ins, _SMALLEST)
    packed, scale = packed.t(), scale.t()  # column-major, as the kernel requires

    def linear(x: Tensor) -> Tensor:
        rows, unit = quantise(x, ins + more_ins, _SMALLEST)
        y = torch._scaled_mm(rows, packed, unit, scale, bias, out_dtype=torch.bfloat16)
        return y[:, :outs] if more_outs else y

    return linear


class Quantization(NamedTuple):
    """How a weight is rounded on a CPU, and why a device does not support the quantization, if it does not."""

    round: Callable[[Tensor], GroupedWeight] | None
    obstacle: Callable[[torch.device, torch.dtype], str | None]


def _cpu_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG001
    if device.type == "cpu":
        return None
    return f"its kernels run on CPU, and the device is {device.type}; set quantization: fp8 or null"


def _no_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG001
    return None


def _fp8_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"its kernels run on GPUs, and the device is {device.type}; set quantization: int8, int4 or null"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "it needs a GPU of compute capability 8.9 (Ada, Hopper) or later; set quantization: null"
    return None if dtype is torch.bfloat16 else f"it works only with bfloat16, not {dtype}; set dtype: bfloat16"


QUANTIZATIONS = {
    "int8": Quantization(to_int8, _cpu_obstacle),
    "int4": Quantization(to_int4, _cpu_obstacle),
    "auto": Quantization(None, _no_obstacle),
    "fp8": Quantization(None, _fp8_obstacle),
}


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
