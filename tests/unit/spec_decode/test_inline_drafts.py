"""Drafts made inline: given once, only for the token they were made for, and never beyond the limit."""

from collections.abc import Sequence

import pytest
import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import DraftSource, ProposeContext
from specray.spec_decode.inline_drafts import InlineDrafts, PendingTrees
from specray.step import UNLIMITED, DraftFault, DraftLimit
from tests.support.drafters import Tokens, make_context

CPU = torch.device("cpu")
NUM_SLOTS, VOCAB_SIZE = 6, 10
TREE = TreeLists([5, 6, 7, 8], [NONE, 0, 0, 2])


class CannedDrafter:
    """Gives each slot the tree that it was made with."""

    max_draft_tokens = 3
    aux_hidden_state_layers = (1, 2)
    reads_next_token = True

    def __init__(self, trees: dict[int, TreeLists]) -> None:
        self.trees = trees
        self.released: list[int] = []

    def propose(self, context: ProposeContext) -> DraftTree:
        return DraftTree.from_lists([self.trees[request.slot] for request in context.requests])

    def release(self, slots: Sequence[int]) -> None:
        self.released += slots


def source_of(drafter: CannedDrafter | None) -> InlineDrafts:
    return InlineDrafts(drafter, NUM_SLOTS, VOCAB_SIZE, CPU)


def drafts_of(trees: dict[int, TreeLists], limit: DraftLimit = UNLIMITED) -> InlineDrafts:
    """A source that has drafted for all slots of `trees`."""
    source = source_of(CannedDrafter(trees))
    source.submit(context(*trees, limit=limit))
    return source


def context(*slots: int, limit: DraftLimit = UNLIMITED) -> ProposeContext:
    return make_context([Tokens(slot, [1, 5], 1, draft_limit=limit) for slot in slots])


def collect(source: DraftSource, roots: dict[int, int], limit: DraftLimit = UNLIMITED) -> list[TreeLists]:
    """Trees of slots whose last known tokens are `roots`."""
    slots, tokens = torch.tensor([list(roots), list(roots.values())], dtype=torch.int64)
    tree, num_nodes = source.collect(slots, tokens, [limit] * len(roots))
    assert num_nodes == tree.num_nodes.tolist()
    assert tree.max_depth <= tree.tokens.shape[1] - 1
    return tree.to_lists()


def bare(root: int) -> TreeLists:
    return TreeLists([root], [NONE])


def test_trees_are_given_to_the_requests_they_were_made_for() -> None:
    source = drafts_of({3: TREE, 1: TreeLists([9, 2], [NONE, 0])})
    assert collect(source, {1: 9, 3: 5, 2: 4}) == [TreeLists([9, 2], [NONE, 0]), TREE, bare(4)]


def test_a_tree_with_another_root_is_dropped_for_good() -> None:
    source = drafts_of({3: TREE})
    assert collect(source, {3: 6}) == [bare(6)]
    assert collect(source, {3: 5}) == [bare(5)]


@pytest.mark.parametrize(
    "tree", [TreeLists([5, 10], [NONE, 0]), TreeLists([5, -2], [NONE, 0]), TreeLists([5, 1, 2], [NONE, 2, 0])]
)
def test_an_invalid_tree_is_its_root(tree: TreeLists) -> None:
    source = drafts_of({3: tree, 4: TREE})
    assert collect(source, {3: 5, 4: 5}) == [bare(5), TREE]
    assert source.take_faults() == []


def test_a_tree_is_given_once() -> None:
    source = drafts_of({3: TREE})
    collect(source, {3: 5})
    assert collect(source, {3: 5}) == [bare(5)]


def test_a_tree_is_cut_to_its_requests_limit() -> None:
    for limit in range(5):
        [row] = collect(drafts_of({3: TREE}), {3: 5}, UNLIMITED._replace(num_tokens=limit))
        assert row == TreeLists(TREE.tokens[: limit + 1], TREE.parents[: limit + 1])


def test_a_tree_loses_its_lower_levels_first() -> None:
    tree = TreeLists([5, 1, 2, 3, 4, 6], [NONE, 0, 1, 2, 0, 4])
    cuts = {
        1: TreeLists([5, 1, 4], [NONE, 0, 0]),
        2: TreeLists([5, 1, 2, 4, 6], [NONE, 0, 1, 0, 3]),
        3: tree,
    }
    for num_steps, expected in cuts.items():
        limit = UNLIMITED._replace(num_steps=num_steps)
        assert collect(drafts_of({3: tree}, limit), {3: 5}) == [expected]
    limit = DraftLimit(3, 2)
    assert collect(drafts_of({3: tree}, limit), {3: 5}, limit) == [TreeLists([5, 1, 2, 4], [NONE, 0, 1, 0])]


def test_released_slots_have_no_tree_and_reach_the_drafter() -> None:
    drafter = CannedDrafter({3: TREE, 4: TREE})
    source = source_of(drafter)
    source.submit(context(3, 4))
    source.release([3])
    assert collect(source, {3: 5, 4: 5}) == [bare(5), TREE]
    assert drafter.released == [3]


def test_the_newest_draft_of_a_slot_counts() -> None:
    drafter = CannedDrafter({3: TREE})
    source = source_of(drafter)
    source.submit(context(3))
    drafter.trees = {3: TreeLists([5, 1], [NONE, 0])}
    source.submit(context(3))
    assert collect(source, {3: 5}) == [TreeLists([5, 1], [NONE, 0])]


def test_a_source_reads_what_its_drafter_reads() -> None:
    source = drafts_of({})
    assert (source.max_draft_tokens, source.aux_hidden_state_layers, source.reads_next_token) == (3, (1, 2), True)


def test_no_requests_give_no_trees() -> None:
    assert collect(drafts_of({}), {}) == []


def test_without_a_drafter_every_tree_is_its_root() -> None:
    source = source_of(None)
    source.submit(context(1))
    source.release([1])
    assert (source.max_draft_tokens, source.aux_hidden_state_layers, source.reads_next_token) == (0, (), False)
    assert source.seconds == 0.0
    assert collect(source, {1: 5, 2: 6}) == [bare(5), bare(6)]


def test_logits_that_are_not_finite_are_a_fault_and_cost_one_tree() -> None:
    class Broken(CannedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            tree = super().propose(context)
            return DraftTree(tree.tokens, tree.parents, torch.tensor([0, 4]), tree.max_depth)

    source = source_of(Broken({3: TREE, 4: TREE}))
    source.submit(context(3, 4))
    assert collect(source, {3: 5, 4: 5}) == [bare(5), TREE]
    assert source.take_faults() == [DraftFault.NOT_A_NUMBER]
    assert source.take_faults() == []


def test_probabilities_come_with_the_trees_they_belong_to() -> None:
    pending = PendingTrees(NUM_SLOTS, VOCAB_SIZE, CPU)
    made = DraftTree.from_lists([TREE, TREE])
    probs = torch.rand(2, 4, VOCAB_SIZE)
    tree = DraftTree(made.tokens, made.parents, made.num_nodes, made.max_depth, probs)
    pending.put(torch.tensor([3, 1]), tree)
    taken, _, _ = pending.take(torch.tensor([1, 2, 3]), torch.tensor([5, 5, 5]), [UNLIMITED] * 3)
    assert taken.draft_probs is not None
    assert torch.equal(taken.draft_probs, torch.stack((probs[1], torch.zeros(4, VOCAB_SIZE), probs[0])))
