"""x W^T + b with a weight that is packed once, as it is or quantised.

The device's operations pack it. Sums of torch depend on the number of rows; those of the CPU kernels do not, and those
of Triton's need not (`fixed_order`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from specray.ops.device_ops import ops_on
from specray.ops.grouped_weight import GroupedWeight, concatenated, to_int4
from specray.ops.quantised_weight import QuantisedWeight, Weight, joined
from specray.ops.quantization import QUANTIZATIONS, make_fp8_linear
from specray.ops.torch_matrix import Linear
from specray.ops.torch_ops import TorchOps

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


def is_row_wise(function: object) -> bool:
    """Whether a row's result has the same bits whatever the other rows are, of a linear or of a layer."""
    return bool(getattr(function, "is_row_wise", False))


def make_linear(weight: Weight, bias: Tensor | None = None, quantization: str | None = None) -> Linear:
    """Function of x [T, in] -> [T, out], of x's type, for `weight` [out, in]; it keeps the weight in its own layout.

    `quantization` is a key of QUANTIZATIONS, or None for the weight's own type. A weight that is already quantised
    stays as it is.
    """
    if quantization == "fp8":
        assert isinstance(weight, Tensor), "such weights are loaded expanded"
        return make_fp8_linear(weight, bias)
    return _ops_of(weight).linear(_quantised(weight, quantization), bias, _in_fixed_order.get())


def make_gated(gate: Weight, up: Weight, quantization: str | None = None) -> Linear:
    """Function of x [T, in] -> silu(x gate^T) * (x up^T) [T, out]; arguments as those of `make_linear`."""
    ops = _ops_of(gate)
    if quantization == "fp8":
        return ops.gate(make_linear(concat(gate, up), None, quantization))
    return ops.gated(concat(_quantised(gate, quantization), _quantised(up, quantization)), _in_fixed_order.get())


def make_batched(weights: Tensor) -> Linear:
    """Function of x [n, T, in] -> [n, T, out], of x's type, for `weights` [n, out, in]."""
    return ops_on(weights.device).batched(weights)


def concat(*weights: Weight) -> Weight:
    """Weights [.., in] one below the other. If only some are quantised, these are expanded."""
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if len(grouped) == len(weights):
        return concatenated(grouped)
    if len(quantised) == len(weights):
        return joined(quantised)
    dtype = next((weight.dtype for weight in weights if isinstance(weight, Tensor)), torch.float32)
    return torch.cat([weight if isinstance(weight, Tensor) else weight.float().to(dtype) for weight in weights])


def take_rows(weight: Tensor | QuantisedWeight, index: Tensor) -> Tensor | QuantisedWeight:
    """The rows `index`, int64 [n], of a weight."""
    index = index.to(weight.device)
    return weight[index] if isinstance(weight, Tensor) else weight.rows(index)


def take_columns(weight: Tensor | QuantisedWeight, part: slice) -> Tensor | QuantisedWeight:
    """Some columns of a weight, expanded if they are not in groups that kernels have."""
    if isinstance(weight, QuantisedWeight):
        if (own := weight.columns(part.start, part.stop - part.start)) is not None:
            return own
        weight = weight.float().to(weight.dtype)
    return weight[:, part].contiguous()


def _quantised(weight: Weight, quantization: str | None) -> Weight:
    if isinstance(weight, GroupedWeight):
        return to_int4(weight.float()) if quantization == "int4" and weight.bits > 4 else weight
    if quantization in (None, "auto"):
        return weight
    to_groups = QUANTIZATIONS[quantization]
    assert to_groups is not None, quantization
    return to_groups(weight if isinstance(weight, Tensor) else weight.float())


def _ops_of(weight: Weight) -> TorchOps:
    """A GroupedWeight runs on CPUs."""
    return ops_on(torch.device("cpu") if isinstance(weight, GroupedWeight) else weight.device)
