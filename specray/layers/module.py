"""The base class of all layers."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn


class Layer(nn.Module):
    """An nn.Module that returns one tensor; nn.Module alone types every call as Any."""

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...
