"""The memory that hidden states go through between processes: shared, page-locked for GPUs, no larger than needed."""

import logging
import os

import pytest
import torch

from specray.worker.remote_drafter.ring import NUM_REGIONS, HiddenStateRing, open_file
from specray.worker.remote_drafter.source import RingLimits

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Driver:
    """What torch shows of CUDA's runtime."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def make_rings(device: torch.device, tokens: int = 3, width: int = 4) -> list[HiddenStateRing]:
    """The two ends of one memory."""
    fd = open_file(tokens, width, torch.bfloat16)
    rings = [HiddenStateRing(fd, tokens, width, torch.bfloat16, device) for _ in range(2)]
    os.close(fd)
    return rings


def test_both_ends_see_what_one_of_them_writes() -> None:
    target, drafter = make_rings(CPU)
    target.regions[2][:] = torch.arange(12).view(3, 4)
    assert torch.equal(drafter.regions[2], target.regions[2])
    assert not drafter.regions[1].any()


def test_on_a_gpu_each_end_locks_the_pages_until_it_is_closed(driver: Driver) -> None:
    ends = make_rings(GPU)
    num_bytes = NUM_REGIONS * 3 * 4 * 2
    assert driver.locked == {end.regions[0].data_ptr(): num_bytes for end in ends}
    for end in ends:
        end.close()
        end.close()
    assert not driver.locked


def test_without_hidden_states_or_a_gpu_nothing_is_locked(driver: Driver) -> None:
    for end in [*make_rings(GPU, width=0), *make_rings(CPU)]:
        assert not driver.locked
        end.close()


def test_memory_that_cannot_be_locked_is_used_as_it_is(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.error = 2
    with caplog.at_level(logging.WARNING):
        target, drafter = make_rings(GPU)
    assert "could not be page-locked (CUDA error 2)" in caplog.text
    target.regions[0][:] = 1.0
    assert bool((drafter.regions[0] == 1.0).all())
    target.close()


def test_a_region_holds_what_a_step_commits_with_the_drafters_trees() -> None:
    """Llama 8B with three layers' states, defaults, a chain of seven: 228 MiB instead of 768 for 128 nodes."""
    limits = RingLimits(32, 4096, prompt_tokens=2048, num_requests=48, dtype=torch.bfloat16)
    assert limits.step_tokens(7) == 2048 + 48 * 8
    assert NUM_REGIONS * limits.step_tokens(7) * 3 * 4096 * 2 >> 20 == 228
