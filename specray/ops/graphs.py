"""CUDA graphs: a sequence of launches that is recorded once for fixed shapes and then repeated by one launch.

What a graph runs may not read a tensor on the host, and may not depend on Python values that change: a replay uses the
values at the time of the capture. It reads and writes tensors that exist before it, so it has neither arguments nor
results. All graphs of a process share their memory, and what one leaves there is lost when another one is replayed.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from specray.errors import ConfigError
from specray.ops.device_ops import ops_on


class Graph(Protocol):
    """One recorded sequence of launches."""

    def capture(self, run: Callable[[], object]) -> None:
        """Record what `run` launches."""

    def replay(self) -> None:
        """Launch it again, on the same memory."""


class CudaGraph:
    """torch.cuda.CUDAGraph. `pool` is the memory that the graphs of a process share."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture(self, run: Callable[[], object]) -> None:
        # Other threads, such as NCCL's watchdog, may ask for events meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        self._graph.replay()


class Graphs:
    """Graphs by key. `make` makes an empty one."""

    def __init__(self, make: Callable[[], Graph]) -> None:
        self._make = make
        self._graphs: dict[Hashable, Graph] = {}

    def capture(self, key: Hashable, run: Callable[[], object]) -> None:
        """Capture `run` as `key`. It runs once before, because compilers and libraries allocate on a first call.

        ConfigError if it launches what cannot be captured.
        """
        run()
        graph = self._make()
        try:
            graph.capture(run)
        except RuntimeError as error:
            raise ConfigError(
                f"CUDA graph capture failed for this model ({error}); set disable_cuda_graph: true"
            ) from error
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def clear(self) -> None:
        self._graphs.clear()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs


def make_graphs(device: torch.device, attention_backend: str) -> Graphs | None:
    """Graphs for `device`; None where steps run without.

    These are CPUs, and GPUs without Triton's kernels: torch's attention would read as many keys as the context has.
    """
    if device.type != "cuda" or not ops_on(device).records_graphs or attention_backend == "torch":
        return None
    pool = torch.cuda.graph_pool_handle()
    return Graphs(lambda: CudaGraph(pool))
