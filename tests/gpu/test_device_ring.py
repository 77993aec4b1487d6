"""Hidden states in a GPU's memory that two processes share, by real CUDA IPC.

tests/unit/worker/remote_drafter/test_device_ring.py is the CPU twin, on stand-ins for CUDA's calls.
"""

from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from specray.worker.remote_drafter.device_ring import DeviceRing
from specray.worker.remote_drafter.ring import NUM_REGIONS
from tests.support.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

SIZE = (64, 4096, torch.bfloat16)


def read(pipe: Connection) -> None:
    """The drafter's process: sums of the regions that it is told of."""
    ring = DeviceRing.open(pipe.recv_bytes(), *SIZE, torch.device("cuda"))
    pipe.send(ring.num_tokens)
    while (region := pipe.recv()) is not None:
        with torch.inference_mode():
            pipe.send(ring.read(region).double().sum(1).tolist())
    ring.close()


def test_another_process_reads_what_was_written_before_its_event() -> None:
    """The device sleeps before each write, so a reader that did not wait would see what was there before."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=read, args=(theirs,))
    process.start()
    ring = DeviceRing.make(*SIZE, torch.device("cuda"))
    ours.send_bytes(ring.export())
    assert ours.poll(120)
    assert ours.recv() == SIZE[0]
    with torch.inference_mode():
        for step in range(3 * NUM_REGIONS):
            region = step % NUM_REGIONS
            states = torch.randn(SIZE[0], SIZE[1], dtype=SIZE[2], device="cuda")
            torch.cuda._sleep(1 << 26)
            ring.write(region, states)
            ours.send(region)
            assert ours.poll(60)
            assert ours.recv() == states.double().sum(1).tolist()
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
