"""The ring on a GPU that two processes share, on stand-ins for CUDA's IPC that check every call's arguments."""

import contextlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from specray.worker.remote_drafter import device_ring
from specray.worker.remote_drafter.device_ring import DeviceRing
from specray.worker.remote_drafter.handshake import DraftEndpoint
from specray.worker.remote_drafter.ring import NUM_REGIONS
from specray.worker.remote_drafter.source import RemoteDrafts, RingLimits

CPU = torch.device("cpu")
HANDLE, REF, EVENT = b"memory", b"counter", b"event of the memory"


class FakeIpc:
    """Memory and events by handle; `log` has what happened to the events, in order."""

    def __init__(self) -> None:
        self.memory: dict[bytes, Tensor] = {}
        self.log: list[str] = []
        self.events = 0

    def reduce_tensor(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """As for a tensor on `cuda:0`."""
        self.memory[HANDLE] = tensor
        nbytes = tensor.untyped_storage().nbytes()
        known = (type(tensor), tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype)
        arguments = (*known, 0, HANDLE, nbytes, 512, False, REF, 3, EVENT, True)
        inspect.signature(reductions.rebuild_cuda_tensor).bind(*arguments)
        return reductions.rebuild_cuda_tensor, arguments

    def rebuild_cuda_tensor(self, *arguments: Any) -> Tensor:
        bound = inspect.signature(reductions.rebuild_cuda_tensor).bind(*arguments).arguments
        memory = self.memory[bound["storage_handle"]]
        assert (bound["tensor_size"], bound["tensor_stride"]) == (memory.size(), memory.stride())
        assert (bound["tensor_cls"], bound["storage_cls"]) == (Tensor, torch.UntypedStorage)
        assert (bound["dtype"], bound["storage_device"], bound["tensor_offset"]) == (memory.dtype, 0, 0)
        assert (bound["storage_size_bytes"], bound["storage_offset_bytes"]) == (memory.untyped_storage().nbytes(), 512)
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


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    ipc = FakeIpc()
    assert "from_ipc_handle" in vars(torch.cuda.Event)
    assert list(inspect.signature(torch.cuda.Event.from_ipc_handle).parameters) == ["device", "handle"]
    monkeypatch.setattr(device_ring, "reduce_tensor", ipc.reduce_tensor)
    monkeypatch.setattr(device_ring, "rebuild_cuda_tensor", ipc.rebuild_cuda_tensor)

    class Event:
        def __new__(cls, **options: Any) -> Any:
            return ipc.event(**options)

        @staticmethod
        def from_ipc_handle(device: torch.device, handle: bytes) -> FakeEvent:  # noqa: ARG004
            return FakeEvent(ipc, int(handle))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return ipc


def test_the_drafter_reads_what_the_target_wrote_after_its_event(ipc: FakeIpc) -> None:
    target = DeviceRing.make(3, 4, torch.bfloat16, CPU)
    drafter = DeviceRing.open(target.export(), 3, 4, torch.bfloat16, CPU)
    assert target.num_tokens == drafter.num_tokens == 3
    for region in (2, 0):
        states = torch.full((2, 4), 1.0 + region)
        target.write(region, states)
        assert torch.equal(drafter.read(region)[:2].float(), states)
        assert not drafter.read(region)[2].any()
    assert ipc.log == ["record 2", "wait 2", "wait 2", "record 0", "wait 0", "wait 0"]
    assert ipc.events == NUM_REGIONS


def test_a_closed_ring_lets_go_of_the_memory(ipc: FakeIpc) -> None:
    ring = DeviceRing.make(3, 4, torch.float32, CPU)
    ring.export()
    ring.close()
    assert ring.regions == []
    assert ipc.memory[HANDLE].shape == (NUM_REGIONS, 3, 4)


def test_a_rank_has_one_ring_for_all_drafters_that_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed never lets go of memory that it had opened."""
    made: list[tuple[int, int]] = []

    def make(tokens: int, width: int, *_: object) -> object:
        made.append((tokens, width))
        return object()

    monkeypatch.setattr(DeviceRing, "make", make)
    table = SimpleNamespace(device=torch.device("cuda"))
    endpoint = DraftEndpoint(str(tmp_path / "drafts"), epoch=1, uses_cuda_ipc=True)
    drafts = RemoteDrafts(endpoint, RingLimits(2, 8, 64, 4, torch.float32), table)  # type: ignore[arg-type]
    with contextlib.closing(drafts):
        first = drafts._device_ring(64, 24)
        assert first is not None
        assert drafts._device_ring(64, 24) is first
        assert drafts._device_ring(64, 0) is None  # no hidden states are read
    assert made == [(64, 24)]
