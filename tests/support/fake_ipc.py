"""CUDA's IPC on a machine without a GPU: memory and events by handle, for two ends in one process or in two.

What a stand-in for a device computes is there when the call returns, so an event has nothing to wait for.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from specray.worker.remote_drafter import device_ring

REF, EVENT = b"counter", b"event of the memory"


class FakeIpc:
    """Memory and events by handle; `log` has what happened to the events, in order."""

    def __init__(self) -> None:
        self.memory: dict[bytes, Tensor] = {}
        self.log: list[str] = []
        self.events = 0

    def reduce_tensor(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """As for a tensor on `cuda:0`."""
        file, nbytes = tensor.untyped_storage()._share_fd_cpu_()  # which moves it, and views with it
        handle = b"/proc/%d/fd/%d" % (os.getpid(), file)
        self.memory[handle] = tensor
        known = (type(tensor), tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype)
        arguments = (*known, 0, handle, nbytes, 512, False, REF, 3, EVENT, True)
        inspect.signature(reductions.rebuild_cuda_tensor).bind(*arguments)
        return reductions.rebuild_cuda_tensor, arguments

    def rebuild_cuda_tensor(self, *arguments: Any) -> Tensor:
        bound = inspect.signature(reductions.rebuild_cuda_tensor).bind(*arguments).arguments
        file, nbytes = bound["storage_handle"].decode(), bound["storage_size_bytes"]
        memory = torch.from_file(file, True, nbytes, dtype=torch.uint8).view(bound["dtype"])
        memory = memory.view(bound["tensor_size"])
        assert memory.stride() == bound["tensor_stride"]
        assert (bound["tensor_cls"], bound["storage_cls"]) == (Tensor, torch.UntypedStorage)
        assert (bound["storage_device"], bound["tensor_offset"]) == (0, 0)
        assert (os.path.getsize(file), bound["storage_offset_bytes"]) == (nbytes, 512)
        assert (bound["ref_counter_handle"], bound["ref_counter_offset"]) == (REF, 3)
        assert (bound["event_handle"], bound["event_sync_required"], bound["requires_grad"]) == (EVENT, True, False)
        return memory

    def event(self, **options: Any) -> "FakeEvent":
        inspect.signature(torch.cuda.Event.__new__).bind(torch.cuda.Event, **options)
        assert options == {"interprocess": True}
        self.events += 1
        return FakeEvent(self, self.events - 1)


class FakeEvent:
    def __init__(self, ipc: FakeIpc, number: int) -> None:
        self._ipc, self._number = ipc, number

    def ipc_handle(self) -> bytes:
        return b"%d" % self._number

    def record(self) -> None:
        self._ipc.log.append(f"record {self._number}")

    def wait(self) -> None:
        self._ipc.log.append(f"wait {self._number}")


@contextmanager
def fake_ipc() -> Iterator[FakeIpc]:
    """Within it, tensors and events of a CPU can be shared like a GPU's."""
    ipc = FakeIpc()
    assert "from_ipc_handle" in vars(torch.cuda.Event)
    assert list(inspect.signature(torch.cuda.Event.from_ipc_handle).parameters) == ["device", "handle"]

    class Event:
        def __new__(cls, **options: Any) -> Any:
            return ipc.event(**options)

        @staticmethod
        def from_ipc_handle(device: torch.device, handle: bytes) -> FakeEvent:  # noqa: ARG004
            return FakeEvent(ipc, int(handle))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_ring, "reduce_tensor", ipc.reduce_tensor)
        patch.setattr(device_ring, "rebuild_cuda_tensor", ipc.rebuild_cuda_tensor)
        patch.setattr(torch.cuda, "Event", Event)
        yield ipc
