"""x W^T + b with a weight that is packed once, and the selection of its kernel.

On a CPU these are our own kernels (`specray.ops.cpu`). torch's operations take their place on other devices, and where
the kernels cannot be compiled. Their sums depend on the number of rows; Triton's do not (`fixed_order`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.cpu.library import kernels
from specray.ops.cpu.matrix import GatedMatrix, PackedMatrix
from specray.ops.gpu import uses_triton
from specray.ops.grouped_weight import GroupedWeight, Weight, concatenated, to_int4
from specray.ops.quantization import QUANTIZATIONS, make_fp8_linear

Linear = Callable[[Tensor], Tensor]

_in_fixed_order = ContextVar("in_fixed_order", default=False)


@contextmanager
def fixed_order(enabled: bool) -> Iterator[None]:
    """Where enabled, weights that are packed within it are multiplied by Triton with sums in one order.

    This is `EngineConfig.deterministic`. Weights are packed while a model is loaded. The CPU kernels always sum in one
    order.
    """
    token = _in_fixed_order.set(enabled)
    try:
        yield
    finally:
        _in_fixed_order.reset(token)


def is_row_wise(linear: Linear) -> bool:
    """Whether a row's result has the same bits whatever the other rows are."""
    return getattr(linear, "is_row_wise", False)


def make_linear(weight: Weight, bias: Tensor | None = None, quantization: str | None = None) -> Linear:
    """Function of x [T, in] -> [T, out], of x's type, for `weight` [out, in]; it keeps the weight in its own layout.

    `quantization` is a key of QUANTIZATIONS, or None for the weight's own type. A weight that is already quantised
    stays as it is.
    """
    if quantization == "fp8":
        assert isinstance(weight, Tensor), "weights that are already quantised run on CPUs"
        return make_fp8_linear(weight, bias)
    weight = _quantised(weight, quantization)
    if _is_in_fixed_order(weight):
        from specray.ops.gpu.matrix import FixedOrderMatrix

        return FixedOrderMatrix(weight, bias)
    own = kernels() if _is_on_cpu(weight) else None
    if own is None and isinstance(weight, Tensor) and uses_triton(weight.device):
        from specray.ops.gpu.few_rows import GpuMatrix

        return GpuMatrix(weight, bias)
    return TorchMatrix(weight, bias) if own is None else PackedMatrix(own, weight, bias)


def make_gated(gate: Weight, up: Weight, quantization: str | None = None) -> Linear:
    """Function of x [T, in] -> silu(x gate^T) * (x up^T) [T, out]; arguments as those of `make_linear`."""
    own = kernels() if _is_on_cpu(gate) else None
    if own is not None:
        both = concat(_quantised(gate, quantization), _quantised(up, quantization))
        return GatedMatrix(own, _rows(both, slice(0, gate.shape[0])), _rows(both, slice(gate.shape[0], None)))
    linear = make_linear(concat(gate, up), None, quantization)
    if isinstance(gate, Tensor) and uses_triton(gate.device):
        from specray.ops.gpu.few_rows import GpuMatrix
        from specray.ops.gpu.matrix import GatedUnits

        return linear.gated if isinstance(linear, GpuMatrix) else GatedUnits(linear)

    def gated(x: Tensor) -> Tensor:
        first, second = linear(x).chunk(2, -1)
        return F.silu(first) * second

    return gated


def concat(*weights: Weight) -> Weight:
    """Weights [.., in] one below the other. If only some are quantised, these are expanded."""
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if len(grouped) == len(weights):
        return concatenated(grouped)
    dtype = next(weight.dtype for weight in weights if isinstance(weight, Tensor))
    return torch.cat([weight if isinstance(weight, Tensor) else weight.float().to(dtype) for weight in weights])


def _quantised(weight: Weight, quantization: str | None) -> Weight:
    if isinstance(weight, GroupedWeight):
        return to_int4(weight.float()) if quantization == "int4" and weight.bits > 4 else weight
    if quantization in (None, "auto"):
        return weight
    to_groups = QUANTIZATIONS[quantization].round
    assert to_groups is not None, quantization
    return to_groups(weight)


def _rows(weight: Weight, part: slice) -> Weight:
    return weight[part] if isinstance(weight, Tensor) else weight.rows(part)


def _is_in_fixed_order(weight: Weight) -> TypeGuard[Tensor]:
    return _in_fixed_order.get() and isinstance(weight, Tensor) and uses_triton(weight.device)


def _is_on_cpu(weight: Weight) -> bool:
    return isinstance(weight, GroupedWeight) or weight.device.type == "cpu"


class TorchMatrix:
    """x [T, in] -> x W^T + b [T, out] with torch's matmul.

    Quantised weights are expanded again, once for each type of activations, and activations are not rounded.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._expanded: dict[torch.dtype, Tensor] = {}  # by the type of the activations

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._weight, Tensor):
            return _product(x, self._weight, self._bias)
        if x.dtype not in self._expanded:
            self._expanded[x.dtype] = self._weight.float().to(x.dtype)
        return _product(x, self._expanded[x.dtype], None if self._bias is None else self._bias.to(x.dtype))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's linear, which Inductor would replace by mm.

    In float32 on a CPU that is slower for one token: 82 instead of 70 ms for the layers of SmolLM2-135M on one core.
    """
    if torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype is torch.float32:
        result: Tensor = _opaque_product(x, weight, bias)
        return result
    return F.linear(x, weight, bias)


@torch.library.custom_op("specray::linear", mutates_args=())
def _opaque_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


@_opaque_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(len(x), len(weight))
