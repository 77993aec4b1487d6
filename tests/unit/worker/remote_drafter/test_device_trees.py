"""Trees in memory that a drafter shares with its target, on a CPU: what a step takes, and what it does not."""

import threading
from collections.abc import Iterator

import pytest
import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.worker.remote_drafter.device_trees import DeviceMemory, DeviceTrees
from tests.support.fake_ipc import FakeIpc, fake_ipc

CPU = torch.device("cpu")
LONG_S = 60.0
ROWS, NODES = 3, 4
ONE = DraftTree.from_lists([TreeLists([7, 8, 9], [NONE, 0, 0]), TreeLists([5], [NONE])])
OTHER = DraftTree.from_lists([TreeLists([1, 2, 3, 4], [NONE, 0, 1, 2]), TreeLists([6, 5], [NONE, 0])])


@pytest.fixture
def ipc() -> Iterator[FakeIpc]:
    with fake_ipc() as ipc:
        yield ipc


@pytest.fixture
def ends(ipc: FakeIpc) -> tuple[DeviceTrees, DeviceTrees]:  # noqa: ARG001
    """The target's and the drafter's."""
    target = DeviceTrees.make(ROWS, NODES, CPU)
    return target, DeviceTrees.open(target.export(), ROWS, NODES, CPU)


def taken(target: DeviceTrees, region: int, number: int, timeout_s: float = 0.0) -> list[TreeLists] | None:
    """The trees of two requests; None if they are not in time."""
    tree, in_time = target.get(region, number, 2, timeout_s)
    if not in_time.wait().tolist()[0]:
        assert tree.num_nodes.tolist() == [NONE, NONE]
        return None
    return tree.to_lists()


def test_trees_are_there_once_their_number_is(ends: tuple[DeviceTrees, DeviceTrees]) -> None:
    target, drafter = ends
    assert taken(target, 2, 11) is None
    drafter.put(2, 11, ONE)
    assert taken(target, 2, 11) == ONE.to_lists()
    assert taken(target, 1, 11) is None  # another region


def test_a_step_waits_until_trees_come_and_no_longer(ends: tuple[DeviceTrees, DeviceTrees]) -> None:
    target, drafter = ends
    threading.Timer(0.1, drafter.put, (0, 1, ONE)).start()
    assert taken(target, 0, 1, LONG_S) == ONE.to_lists()


def test_trees_of_an_earlier_order_are_none(ends: tuple[DeviceTrees, DeviceTrees]) -> None:
    """Its drafter was late, is frozen, or was replaced and still runs."""
    target, drafter = ends
    drafter.put(0, 5, ONE)
    assert taken(target, 0, 9, 0.01) is None
    drafter.put(0, 9, OTHER)  # the region is used again
    assert taken(target, 0, 9) == OTHER.to_lists()
    drafter.put(0, 5, ONE)
    assert taken(target, 0, 9) is None


def test_smaller_trees_hide_what_a_region_had_before(ends: tuple[DeviceTrees, DeviceTrees]) -> None:
    target, drafter = ends
    drafter.put(0, 1, OTHER)
    drafter.put(0, 2, ONE)
    assert taken(target, 0, 2) == ONE.to_lists()


def test_a_drafter_that_could_not_draft_is_not_waited_for(ends: tuple[DeviceTrees, DeviceTrees]) -> None:
    target, drafter = ends
    drafter.put(0, 1, ONE)
    drafter.put(0, 2, None)
    tree, in_time = target.get(0, 2, 2, LONG_S)
    assert in_time.wait().tolist() == [1]
    assert tree.num_nodes.tolist() == [NONE, NONE]


def test_trees_with_more_nodes_than_there_is_room_are_none(ends: tuple[DeviceTrees, DeviceTrees]) -> None:
    target, drafter = ends
    tokens = torch.tensor([[1, 2, 3, 4, 5], [1, 2, NONE, NONE, NONE]])
    drafter.put(0, 1, DraftTree(tokens, tokens - 2, torch.tensor([5, 2]), 4))
    tree, _ = target.get(0, 1, 2, 0.0)
    assert tree.num_nodes.tolist() == [NONE, 2]


def test_an_outcome_is_read_after_its_event_and_no_tree_overwrites_it(
    ipc: FakeIpc, ends: tuple[DeviceTrees, DeviceTrees]
) -> None:
    """Trees of a drafter that was replaced may come at any time."""
    target, drafter = ends
    outcome = torch.arange(2 * 6).view(2, 6)  # of trees of two nodes
    target.put_outcome(3, outcome)
    for region in range(4):
        drafter.put(region, 9, OTHER)
    assert torch.equal(drafter.outcome(3, 2, 2), outcome)
    assert ipc.log == ["record 3", "wait 3"]
    assert taken(target, 3, 9) == OTHER.to_lists()


@pytest.mark.usefixtures("ipc")
def test_a_rank_has_one_memory_for_all_drafters_that_connect() -> None:
    """One that was killed never lets go of memory that it had opened."""
    memory = DeviceMemory(ROWS, torch.float32, CPU)
    assert (first := memory.ring(64, 24)) is not None
    assert memory.ring(64, 24) is first
    assert memory.ring(64, 0) is None  # no hidden states are read
    assert memory.trees(NODES) is memory.trees(NODES)
    assert memory.trees(NODES) is not memory.trees(1)


def test_a_drafter_with_shorter_paths_has_the_ring_of_the_one_before(ipc: FakeIpc) -> None:
    """Memory that drafters have opened may never be freed."""
    memory = DeviceMemory(ROWS, torch.float32, CPU)
    rings = [memory.ring(tokens, width) for tokens, width in ((8, 6), (5, 6), (8, 4), (9, 6))]
    assert rings[1] is rings[0]
    assert [len({id(ring) for ring in rings}), ipc.events] == [3, 3 * 4]
