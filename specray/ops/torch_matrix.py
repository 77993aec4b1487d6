"""Weight matrices as functions of activations, with torch's matmul."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops.quantised_weight import QuantisedWeight, Weight

Linear = Callable[[Tensor], Tensor]


class TorchMatrix:
    """x [T, in] -> x W^T + b [T, out] with torch's matmul.

    Activations are not rounded. A GroupedWeight is expanded once for each type of activations, and a QuantisedWeight in
    each product: it is there to take less memory.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._expanded: dict[torch.dtype, Tensor] = {}  # by the type of the activations

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._weight, Tensor):
            return _product(x, self._weight, self._bias)
        if isinstance(self._weight, QuantisedWeight):
            return _product(x, self._weight.float().to(x.dtype), None if self._bias is None else self._bias.to(x.dtype))
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
