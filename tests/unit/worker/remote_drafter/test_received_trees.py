"""Trees that came as lists become those that trees on the device become."""

from random import Random

import pytest
import torch

from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.spec_decode.drafter import TreeRows
from specray.spec_decode.pending_trees import PendingTrees
from specray.step import DraftLimit
from specray.worker.remote_drafter.received_trees import ReceivedTree, ReceivedTrees

SLOTS, VOCABULARY, CPU = 6, 20, torch.device("cpu")


def random_tree(random: Random, scored: bool) -> ReceivedTree:
    size = random.randint(1, 5)
    parents = [-1, *(random.randrange(node) for node in range(1, size))]
    scores = [1.0, *sorted((random.random() for _ in range(size - 1)), reverse=True)]
    return ReceivedTree(TreeLists(random.choices(range(VOCABULARY), k=size), parents), scores if scored else [])


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_same_trees_are_taken_as_on_the_device(seed: int, scored: bool) -> None:
    random = Random(seed)
    slots = random.sample(range(SLOTS), 4)
    trees = [random_tree(random, scored) for _ in slots]
    made = DraftTree.from_lists([tree.nodes for tree in trees])
    if scored:
        width = made.tokens.shape[1]
        scores = [[*tree.scores, *[0.0] * (width - len(tree.scores))] for tree in trees]
        made = made._replace(scores=torch.tensor(scores))
    received, pending = ReceivedTrees(CPU), PendingTrees(SLOTS, VOCABULARY, CPU)
    received.put(slots, trees)
    pending.put(torch.tensor(slots), made)
    for source in (received, pending):
        source.drop(slots[3:])
    wanted = random.sample(range(SLOTS), 5)
    known = {slot: tree.nodes.tokens[0] for slot, tree in zip(slots, trees, strict=True)}
    host = [(slot, known.get(slot, 3) if random.random() < 0.8 else 7) for slot in wanted]
    least = 0.4 if scored else 0.0
    limits = [DraftLimit(random.choice([0, 1, 3, 2**31 - 1]), 9, random.choice([0.0, least])) for _ in wanted]
    rows = TreeRows(torch.tensor(wanted), torch.tensor([root for _, root in host]), host)
    for _ in range(2):  # the second time, none is left
        tree, num_nodes = received.take(rows, limits)
        expected, counts = pending.take(rows.slots, rows.roots, limits).wait_for_sizes()
        assert tree.to_lists() == expected.to_lists()
        assert num_nodes == counts == tree.num_nodes.tolist()
        assert tree.max_depth == tree.tokens.shape[1] - 1
        assert tree.are_chains == expected.are_chains or max(counts) == 1
        assert [part for part in received.scores if part] == [pytest.approx(part) for part in pending.scores if part]
