"""The base class of all layers."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn


class Layer(nn.Module):
    """An nn.Module that returns one tensor, without the overhead of nn.Module's calls and attribute lookups.

    A decode step of SmolLM2-135M calls 270 layers, and that overhead took 5 % of its time on one CPU core. Calls
    therefore go straight to `forward` (hooks do not run), and submodules are also ordinary attributes.
    """

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value
