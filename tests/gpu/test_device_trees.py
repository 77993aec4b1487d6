"""Outcomes and trees in a GPU's memory that two processes share, by real CUDA IPC and the kernels that poll.

tests/unit/worker/remote_drafter/test_device_trees.py is the CPU twin. Without an MPS daemon the processes take turns.
"""

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.worker.remote_drafter.device_trees import DeviceTrees
from specray.worker.remote_drafter.ring import NUM_REGIONS
from tests.support.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

SIZE = (64, 8)
LATE_S = 0.5


def trees(number: int) -> list[TreeLists]:
    return [TreeLists([number, row], [NONE, 0]) for row in range(SIZE[0])]


def draft(pipe: Connection) -> None:
    """The drafter's process, which makes trees of the outcomes; its kernels run late."""
    device = torch.device("cuda")
    ours = DeviceTrees.open(pipe.recv_bytes(), *SIZE, device)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        with torch.inference_mode():
            torch.cuda._sleep(1 << 26)
            tree = DraftTree.from_lists(trees(0), device)
            tree.tokens[:, 0].copy_(ours.outcome(order[0], SIZE[0], 1)[:, 2])
            ours.put(*order, tree)


def test_a_device_takes_trees_of_another_process_when_they_come_and_waits_no_longer_than_it_may() -> None:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=draft, args=(theirs,))
    process.start()
    memory = DeviceTrees.make(*SIZE, torch.device("cuda"))
    ours.send_bytes(memory.export())
    assert ours.poll(120)
    assert ours.recv() == "ready"
    with torch.inference_mode():
        for number in range(1, 3 * NUM_REGIONS):
            region = number % NUM_REGIONS
            torch.cuda._sleep(1 << 28)
            memory.put_outcome(region, torch.full((SIZE[0], 4), number, device="cuda"))
            ours.send((region, number))  # before the device has the outcome
            tree, in_time = memory.get(region, number, SIZE[0], 60.0)
            assert in_time.wait().tolist() == [1]
            assert tree.to_lists() == trees(number)
        torch.cuda.synchronize()
        start = time.monotonic()
        tree, in_time = memory.get(0, 99, SIZE[0], LATE_S)
        assert in_time.wait().tolist() == [0]
        assert LATE_S <= time.monotonic() - start < LATE_S + 1.0
        assert set(tree.num_nodes.tolist()) == {NONE}
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
