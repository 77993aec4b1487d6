"""Counts where a step reads tensors on the host. On a GPU each such read waits for the device.

A CPU cannot show the wait, but the calls are the same: `tolist`, `numpy`, `item`, `bool`, and operations whose result
has a shape that depends on data.
"""

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specray
from specray.models.transformers_rows import reads_on_host

PACKAGE = f"{Path(specray.__file__).parent}/"  # in whatever folder it has been cloned into

# What runs on a CPU only, where reading is free: torch's attention looks for contiguous KV there, the CPU kernels get
# numbers, and the host polls where a GPU does.
CPU_ONLY = ("ops/attention_torch.py", "ops/cpu/", "ops/polling_torch.py")


class HostReads(TorchDispatchMode):
    """Records this thread's reads while it is entered: `places` are their lines, "module.py:line"."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        # Reads of CPU tensors that torch does not dispatch.
        for name in ("tolist", "numpy"):
            setattr(torch.Tensor, name, self._recording(getattr(torch._C.TensorBase, name)))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for name in ("tolist", "numpy"):
            delattr(torch.Tensor, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_on_host(func, args, kwargs):
            self._record()
        return func(*args, **kwargs)

    def _recording(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            self._record()
            return method(*args, **kwargs)

        return read

    def _record(self) -> None:
        if threading.get_ident() != self._thread:
            return
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        if frames:
            place = f"{frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].lineno}"
            if not place.startswith(CPU_ONLY):
                self.places.append(place)
