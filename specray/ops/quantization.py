"""The quantizations of linear layers that an option asks for: int8 and int4 on CPUs, fp8 on GPUs.

`auto` keeps the blocks of a quantised GGUF file and rounds nothing else. What a checkpoint has quantised needs none of
them: `quantised_weight`.

Weights of int8 and int4 have a scale for each group of 32 inputs (`grouped_weight`). The kernels round activations to 8
bits in groups of 32 as well, and sum the products of a group as integers. Weights of fp8 have a scale for each output
channel, activations one for each row.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.config import QUANTIZATION_DEVICES, quantization_obstacle
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


# How a weight is rounded on a CPU, by the name of the quantization.
QUANTIZATIONS: dict[str, Callable[[Tensor], GroupedWeight] | None] = {
    "int8": to_int8,
    "int4": to_int4,
    "auto": None,
    "fp8": None,
}


def check_quantization(name: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError if `device` does not support this quantization for activations of `dtype`."""
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise ConfigError(f"quantization={name!r} is not known; choose one of {', '.join(QUANTIZATIONS)}, or null")
    reason = quantization_obstacle("quantization", name, device.type, str(dtype).removeprefix("torch."))
    if reason is None and name == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        reason = "needs a GPU of compute capability 8.9 (Ada, Hopper) or later; set quantization: null"
    if reason is not None:
        raise ConfigError(f"quantization={name} {reason}")


def quantization_of_choice(device: torch.device) -> str | None:
    """The quantization for weights that affect only speed, such as a drafter's: int8 where it runs, else none."""
    return "int8" if device.type == QUANTIZATION_DEVICES["int8"] else None
