"""A GPU that exists only as a device of fake tensors: shapes, types and devices are checked, and nothing is computed.

Tensors of different devices in one operation are errors, as on a real GPU. So are reads by the host, apart from a
step's two (see `test_host_reads`), which get a number that the test chooses. A build of torch without CUDA cannot index
fake CUDA tensors from Python, so indexing goes through operators instead.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from specray.models import weights

# Loading a head checks that its ids are those of the target, loading positions that each is a number.
LOADERS = ("eagle_files.py", "rotary.py")
TREES = "pending_trees.py"
# What a step may read on the host; several.py reads whether trees are missing once their step is over.
READERS = (TREES, "step_output.py", "padded_step.py", "broadcast.py", "wire.py", "several.py")


@contextmanager
def fake_cuda(read: int = 1, num_nodes: int | None = None) -> Iterator[FakeTensorMode]:
    """Within it, `device: cuda` works, weights that are loaded are fake, and a step's host reads find `read`s.

    Those of the sizes of trees find `num_nodes`, if given.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        found = {"device_count": 1, "is_available": True, "set_device": None, "mem_get_info": (1 << 36, 1 << 36)}
        for name, value in found.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=value))
        stack.enter_context(mock.patch("torch.Event"))
        properties = SimpleNamespace(name="a fake GPU", multi_processor_count=132, major=9)
        stack.enter_context(mock.patch("torch.cuda.get_device_properties", return_value=properties))
        get = weights._SafetensorsShard.get

        def get_fake(shard: Any, name: str) -> Tensor:
            with unset_fake_temporarily():  # type: ignore[no-untyped-call]
                tensor = get(shard, name)
            return mode.from_tensor(tensor)

        stack.enter_context(mock.patch.object(weights._SafetensorsShard, "get", get_fake))
        # Loading compares a head's mask of ids, which is right, and weights that could be shared, which differ.
        stack.enter_context(mock.patch("torch.equal", lambda one, other: one.dtype is torch.bool))  # noqa: ARG005
        for name, replacement in _host_reads(read, num_nodes or read).items():
            stack.enter_context(mock.patch.object(FakeTensor, name, replacement))
        stack.enter_context(mode)
        stack.enter_context(_WithoutValues())
        yield mode


def _host_reads(read: int, num_nodes: int) -> dict[str, Any]:
    """Methods of fake tensors that the host reads with, where it may."""

    def numpy(tensor: FakeTensor) -> Any:
        assert sys._getframe(1).f_code.co_filename.endswith(READERS), "a read by the host"
        return np.full(tuple(tensor.shape), read)

    def to_list(tensor: FakeTensor) -> Any:
        reader = sys._getframe(1).f_code.co_filename
        if reader.endswith(LOADERS):
            return list(range(len(tensor)))
        assert reader.endswith(READERS), "a read by the host"
        return np.full(tuple(tensor.shape), num_nodes if reader.endswith(TREES) else read).tolist()

    def to_int(tensor: FakeTensor) -> int:  # noqa: ARG001
        assert sys._getframe(1).f_code.co_filename.endswith(LOADERS), "a read by the host"
        return 0

    def to_bool(tensor: FakeTensor) -> bool:  # noqa: ARG001
        assert sys._getframe(1).f_code.co_filename.endswith(LOADERS), "a read by the host"
        return False

    return {"numpy": numpy, "tolist": to_list, "__int__": to_int, "__bool__": to_bool}


# Methods that ask the driver for the device before they call these operators.
_OPERATORS: dict[Any, Any] = {
    Tensor.__invert__: torch.ops.aten.bitwise_not.default,
    Tensor.copy_: torch.ops.aten.copy_.default,
    Tensor.contiguous: lambda tensor: (
        tensor
        if tensor.is_contiguous()
        else torch.ops.aten.clone.default(tensor, memory_format=torch.contiguous_format)
    ),
}


class _WithoutValues(TorchFunctionMode):
    """Indexing by operators, and no values of constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:  # a constant, with which fake operations would compute
            device = kwargs.pop("device", None) if kwargs else None
            with unset_fake_temporarily():  # type: ignore[no-untyped-call]
                real = func(*args, **(kwargs or {}))
            return torch.empty(real.shape, dtype=real.dtype, device=device)
        if args and isinstance(args[0], FakeTensor):
            if func is Tensor.__getitem__:
                return _get(args[0], args[1])
            if func is Tensor.__setitem__:
                return _set(*args)
            if func in _OPERATORS:
                return _OPERATORS[func](*args, **(kwargs or {}))
            if args[0].constant is not None:  # an array of the host
                args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


def _view(tensor: Tensor, key: Any) -> tuple[Tensor, list[Any]]:
    """(the view of `tensor` after its integers, slices and new axes; the index tensors of what is left)."""
    parts = list(key) if isinstance(key, tuple) else [key]
    taken = sum(part.dim() if _is_mask(part) else 1 for part in parts if part is not None and part is not Ellipsis)
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        place = next(index for index, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (tensor.dim() - taken)
    indexes: list[Any] = []
    axis = 0
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(part, bool | int):
            tensor = torch.ops.aten.select.int(tensor, axis, part)
            continue
        elif isinstance(part, slice):
            if part != slice(None):
                start, stop, step = part.indices(tensor.shape[axis])
                tensor = torch.ops.aten.slice.Tensor(tensor, axis, start, stop, step)
        else:
            index = part if isinstance(part, Tensor) else torch.tensor(part)
            indexes += [None] * (axis - len(indexes)) + [index]
            axis += index.dim() if _is_mask(index) else 1
            continue
        axis += 1
    return tensor, indexes


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype is torch.bool


def _get(tensor: Tensor, key: Any) -> Tensor:
    view, indexes = _view(tensor, key)
    if _is_mask(key) and tensor.device.type == "cpu":
        return tensor  # on loading; the number of elements depends on values
    found: Tensor = torch.ops.aten.index.Tensor(view, indexes) if indexes else view
    return found


def _set(tensor: Tensor, key: Any, value: Any) -> None:
    view, indexes = _view(tensor, key)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=view.dtype, device=view.device)
    if indexes:
        torch.ops.aten.index_put_(view, indexes, value)
    else:
        torch.ops.aten.copy_.default(view, value)
