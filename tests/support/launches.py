"""Counts what a GPU would launch, on fake CUDA tensors: operators of torch that compute, and Triton's kernels.

An operator counts once, though a few (sorts, sums over many elements) are several kernels on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_cuda import fake_cuda
from tests.support.graph_stand_in import GraphsAtOnce

_NOTHING = ("aten::empty", "aten::new_empty", "aten::lift", "aten::detach", "aten::_unsafe_view", "prim::")


class Launches(TorchDispatchMode):
    """The names of everything that is launched on the GPU while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (_gpu_tensors(part) for part in ((args, kwargs), result))
        memory = {_storage(tensor) for tensor in inputs}
        is_view = not func._schema.is_mutable and all(_storage(output) in memory for output in outputs)
        if (inputs or outputs) and not is_view and not func.name().startswith(_NOTHING):
            self.names.append(func.name())
        return result


def _gpu_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device.type == "cuda"]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class CountedGraph:
    """A Graph that is never computed; `launches` are those of its capture."""

    launches: list[str]

    def __init__(self, counter: "Counter") -> None:
        self._counter = counter

    def capture(self, run: Callable[[], object]) -> None:
        with self._counter.counting() as launches:
            run()
        self.launches = launches

    def replay(self) -> None:
        self._counter.replayed.append(self)


class Counter:
    """Launches of graphs and of what runs around them."""

    def __init__(self) -> None:
        self.graphs = GraphsAtOnce(lambda: CountedGraph(self))
        self.replayed: list[CountedGraph] = []
        self._current: list[Launches] = []

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        launches = Launches()
        self._current.append(launches)
        with launches:
            yield launches.names
        self._current.pop()

    def launch_kernel(self, kernel: Any, *_: Any, **__: Any) -> None:
        if self._current:
            self._current[-1].names.append(f"triton::{kernel.fn.__name__}")


@contextmanager
def fake_launches(num_nodes: int) -> Iterator[Counter]:
    """Within it, a worker on `cuda` counts its launches instead of computing. Trees have `num_nodes`."""
    counter = Counter()
    with ExitStack() as stack:
        run = "triton.runtime.interpreter.InterpretedFunction.run"
        stack.enter_context(mock.patch(run, lambda kernel, *args, **options: counter.launch_kernel(kernel)))  # noqa: ARG005
        stack.enter_context(mock.patch("specray.worker.startup.make_graphs", return_value=counter.graphs))
        stack.enter_context(mock.patch("specray.ops.gpu.attention.CHUNK", 64))  # so that chunks are shared
        stack.enter_context(fake_cuda(num_nodes=num_nodes))
        yield counter
