"""CUDA graphs on a CPU, as strict as real ones: what a graph may not do is an error, or shows as another text.

While a graph is captured, torch's operators are recorded with the tensors that they read and write, and reading on the
host and copying from it are errors. A replay repeats exactly these operators on the same memory, so values of Python
stay what they were. Before each replay, all memory that graphs have allocated is filled with garbage, because graphs on
a GPU share it. Our own CPU kernels are no operators of torch, so they are switched off.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specray.models.transformers_rows import reads_on_host
from specray.ops.graphs import Graphs

_GARBAGE = 0x5A  # in every byte: large integers and floats


class Operation(NamedTuple):
    """One operator for which a GPU does something, so not a view; `outputs` are the tensors of its result."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    is_collective: bool


class GraphsAtOnce(Graphs):
    """Captures without the run before it, for graphs that have no memory of their own. That run makes what is kept."""

    def capture(self, key: Hashable, run: Callable[[], object]) -> None:
        graph = self._make()
        graph.capture(run)
        self._graphs[key] = graph


class RecordedGraphs(Graphs):
    """All graphs of an engine, their memory and a record of what was replayed."""

    def __init__(self) -> None:
        super().__init__(lambda: RecordedGraph(self))
        self._left: dict[int, Tensor] = {}  # bytes of memory that is not garbage, by address
        self.captured: set[Hashable] = set()
        self.num_captures = 0
        self.replayed: set[Hashable] = set()

    def capture(self, key: Hashable, run: Callable[[], object]) -> None:
        super().capture(key, run)
        self.captured.add(key)
        self.num_captures += 1

    def replay(self, key: Hashable) -> None:
        self._spoil()
        super().replay(key)
        self.leave(self._recorded(key).allocated)
        self.replayed.add(key)

    def leave(self, memory: dict[int, Tensor]) -> None:
        """A graph has written its own memory."""
        self._left |= memory

    def num_launches(self, key: Hashable) -> int:
        return len(self._recorded(key).operations)

    def _spoil(self) -> None:
        """Overwrite what graphs have left in their own memory."""
        with torch._C._DisableTorchDispatch():  # filling is no operator of the engine's
            for memory in self._left.values():
                memory.fill_(_GARBAGE)
        self._left = {}

    def _recorded(self, key: Hashable) -> "RecordedGraph":
        graph = self._graphs[key]
        assert isinstance(graph, RecordedGraph)
        return graph


class RecordedGraph(TorchDispatchMode):
    """A Graph."""

    def __init__(self, graphs: RecordedGraphs) -> None:
        super().__init__()
        self._graphs = graphs
        self.operations: list[Operation] = []
        self.allocated: dict[int, Tensor] = {}  # the bytes, by address

    def capture(self, run: Callable[[], object]) -> None:
        with self, _no_access_by_the_host():
            run()
        self._graphs.leave(self.allocated)

    def replay(self) -> None:
        with torch._C._DisableTorchDispatch():  # no operator that was captured reads on the host
            for function, args, kwargs, outputs, is_collective in self.operations:
                returned = function(*args, **kwargs)
                if is_collective:
                    for work in tree_leaves(returned):
                        if not isinstance(work, Tensor):
                            work.wait()  # a collective goes on in another thread
                for output, result in zip(outputs, _tensors(returned), strict=True):
                    assert output.shape == result.shape, (function, output.shape, result.shape)
                    if output.data_ptr() != result.data_ptr():
                        output.copy_(result)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        assert not reads_on_host(func, args, kwargs), f"the host reads a tensor: {func}"
        assert func is not torch.ops.aten.lift_fresh.default, "a value of the host is copied to the device"
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        inputs = {_address(tensor) for tensor in _tensors((args, kwargs))}
        new = [output for output in outputs if _address(output) not in inputs]
        for output in new:
            self.allocated[_address(output)] = _bytes_of(output)
        is_view = func.namespace == "aten" and not new and not func._schema.is_mutable
        if not is_view:  # schemas of collectives do not say that they write
            self.operations.append(Operation(func, args, kwargs, outputs, func.namespace == "c10d"))
        return result


class RepeatedCall:
    """A Graph that calls its function at each replay: kernels in Triton's interpreter cannot be recorded."""

    def capture(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


@contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraphs]]:
    """Within it, workers capture and replay graphs of the list, and compute with torch's operations."""
    graphs: list[RecordedGraphs] = []

    def make(device: torch.device, attention_backend: str) -> Graphs:  # noqa: ARG001
        graphs.append(RecordedGraphs())
        return graphs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAY_KERNELS", "torch")
        for user in ("startup", "remote_drafter.server"):
            patch.setattr(f"specray.worker.{user}.make_graphs", make)
        yield graphs


@contextmanager
def _no_access_by_the_host() -> Iterator[None]:
    """Reads of CPU tensors that torch does not dispatch, and copies of arrays, are errors."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host reads a tensor, or copies an array to the device")

    with (
        mock.patch.object(torch.Tensor, "tolist", fail),
        mock.patch.object(torch.Tensor, "numpy", fail),
        mock.patch("torch.from_numpy", fail),
    ):
        yield


def _tensors(tree: Any) -> list[Tensor]:
    """Those among an operator's arguments or results. `tree_leaves` would find the same in ten times the time."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory of a tensor."""
    whole: Tensor = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return whole


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
