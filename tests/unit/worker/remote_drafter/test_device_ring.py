"""The ring on a GPU that two processes share, on stand-ins for CUDA's IPC that check every call's arguments."""

from collections.abc import Iterator

import pytest
import torch

from specray.worker.remote_drafter.device_ring import DeviceRing
from specray.worker.remote_drafter.ring import NUM_REGIONS
from tests.support.fake_ipc import FakeIpc, fake_ipc

CPU = torch.device("cpu")


@pytest.fixture
def ipc() -> Iterator[FakeIpc]:
    with fake_ipc() as ipc:
        yield ipc


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
    [memory] = ipc.memory.values()
    assert memory.shape == (NUM_REGIONS, 3, 4)
