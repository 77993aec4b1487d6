"""x W^T + b with a weight that is packed once, and the selection of its matmul kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

from specray.ops.quantization import QUANTIZATIONS

Linear = Callable[[Tensor], Tensor]


def make_linear(weight: Tensor, bias: Tensor | None = None, quantization: str | None = None) -> Linear:
    """Function of x [T, in] -> [T, out] for `weight` [out, in]; it keeps the weight in its own layout.

    `quantization` is a key of QUANTIZATIONS, or None for the weight's own type. In the latter case a CPU weight is
    reordered into oneDNN's blocked layout, which torch otherwise does in every call: one row through SmolLM2-135M in
    bfloat16 takes 9.6 ms instead of 13.0. oneDNN has no such layout for 16-bit types on CPUs without AVX-512.
    """
    if quantization is not None:
        return QUANTIZATIONS[quantization].make(weight, bias)
    if weight.device.type == "cpu" and _is_packable(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        run = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: run(x, packed, bias, "none", [], "")
    by_input = weight.t()
    if bias is None:
        return lambda x: x.mm(by_input)
    return lambda x: torch.addmm(bias, x, by_input)


def _is_packable(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
