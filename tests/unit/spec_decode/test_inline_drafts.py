"""Inline drafts: returned once, only for the root they were made for, and within the limits."""

from collections.abc import Sequence

import pytest
import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import DraftSource, TreeRows
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.no_drafts import NoDrafts
from specray.spec_decode.pending_trees import PendingTrees
from specray.spec_decode.propose_context import ProposeContext
from specray.step import UNLIMITED, DraftFault, DraftLimit
from tests.support.drafters import Tokens, make_context

CPU = torch.device("cpu")
NUM_SLOTS, VOCAB_SIZE = 6, 10
TREE = TreeLists([5, 6, 7, 8], [NONE, 0, 0, 2])


class FixedDrafter:
    """Proposes a fixed tree for each slot."""

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


def source_of(drafter: FixedDrafter) -> InlineDrafts:
    return InlineDrafts(drafter, NUM_SLOTS, VOCAB_SIZE, CPU)


def submitted(trees: dict[int, TreeLists], limit: DraftLimit = UNLIMITED) -> InlineDrafts:
    """A source after drafting for all slots of `trees`."""
    source = source_of(FixedDrafter(trees))
    source.submit(context(*trees, limit=limit))
    return source


def context(*slots: int, limit: DraftLimit = UNLIMITED) -> ProposeContext:
    return make_context([Tokens(slot, [1, 5], 1, draft_limit=limit) for slot in slots])


def collect(source: DraftSource, roots: dict[int, int], limit: DraftLimit = UNLIMITED) -> list[TreeLists]:
    """Collect the trees of slots with their last known tokens."""
    slots, tokens = torch.tensor([list(roots), list(roots.values())], dtype=torch.int64)
    rows = TreeRows(slots, tokens, list(roots.items()))
    tree, num_nodes = source.collect(rows, [limit] * len(roots))
    assert num_nodes == tree.num_nodes.tolist()
    assert tree.max_depth <= tree.tokens.shape[1] - 1
    return tree.to_lists()


def root_only(root: int) -> TreeLists:
    return TreeLists([root], [NONE])


def test_each_request_gets_its_own_tree() -> None:
    source = submitted({3: TREE, 1: TreeLists([9, 2], [NONE, 0])})
    assert collect(source, {1: 9, 3: 5, 2: 4}) == [TreeLists([9, 2], [NONE, 0]), TREE, root_only(4)]


def test_a_tree_with_a_different_root_is_dropped() -> None:
    source = submitted({3: TREE})
    assert collect(source, {3: 6}) == [root_only(6)]
    assert collect(source, {3: 5}) == [root_only(5)]


@pytest.mark.parametrize(
    "tree", [TreeLists([5, 10], [NONE, 0]), TreeLists([5, -2], [NONE, 0]), TreeLists([5, 1, 2], [NONE, 2, 0])]
)
def test_an_invalid_tree_is_reduced_to_its_root(tree: TreeLists) -> None:
    source = submitted({3: tree, 4: TREE})
    assert collect(source, {3: 5, 4: 5}) == [root_only(5), TREE]
    assert source.take_report().faults == []


def test_a_tree_is_returned_once() -> None:
    source = submitted({3: TREE})
    collect(source, {3: 5})
    assert collect(source, {3: 5}) == [root_only(5)]


def test_a_tree_is_cut_to_the_token_limit() -> None:
    for limit in range(5):
        [row] = collect(submitted({3: TREE}), {3: 5}, UNLIMITED._replace(num_tokens=limit))
        assert row == TreeLists(TREE.tokens[: limit + 1], TREE.parents[: limit + 1])


def test_unlikely_nodes_are_cut_and_all_scores_are_reported() -> None:
    """Scores are those of the drafts within the limit of tokens, and are wanted only with a least score."""

    class Scored(FixedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            tree = super().propose(context)
            return tree._replace(scores=torch.tensor([[1.0, 0.5, 0.25, 0.125]]).expand(len(tree.num_nodes), -1))

    tree = TreeLists([9, 3, 4, 5], [NONE, 0, 1, 0])
    for least, num_tokens, kept, scores in (
        (0.25, 9, 3, [0.5, 0.25, 0.125]),
        (0.9, 2, 1, [0.5, 0.25]),
        (0.0, 9, 4, None),
    ):
        source = source_of(Scored({1: tree}))
        source.submit(context(1))
        [collected] = collect(source, {1: 9}, DraftLimit(num_tokens, 9, least))
        assert collected == TreeLists(tree.tokens[:kept], tree.parents[:kept])
        assert source.scores == ([] if scores is None else [scores])


def test_scores_of_narrow_trees_are_cut_after_wide_trees_without_scores() -> None:
    """Places behind a tree's nodes have scores of other trees."""
    pending = PendingTrees(NUM_SLOTS, VOCAB_SIZE, CPU)
    slots, roots = torch.tensor([1]), torch.tensor([9])
    pending.put(slots, DraftTree.chains(torch.tensor([[9, 1, 2, 3, 4, 5, 6]])))
    pending.put(slots, DraftTree.chains(torch.tensor([[9, 3, 4]]))._replace(scores=torch.tensor([[1.0, 0.5, 0.1]])))
    tree, _ = pending.take(slots, roots, [DraftLimit(9, 9, 0.3)]).wait_for_sizes()
    assert tree.to_lists() == [TreeLists([9, 3], [NONE, 0])]


def test_the_depth_limit_applies_before_the_token_limit() -> None:
    tree = TreeLists([5, 1, 2, 3, 4, 6], [NONE, 0, 1, 2, 0, 4])
    cuts = {
        1: TreeLists([5, 1, 4], [NONE, 0, 0]),
        2: TreeLists([5, 1, 2, 4, 6], [NONE, 0, 1, 0, 3]),
        3: tree,
    }
    for num_steps, expected in cuts.items():
        limit = UNLIMITED._replace(num_steps=num_steps)
        assert collect(submitted({3: tree}, limit), {3: 5}) == [expected]
    limit = DraftLimit(3, 2)
    assert collect(submitted({3: tree}, limit), {3: 5}, limit) == [TreeLists([5, 1, 2, 4], [NONE, 0, 1, 0])]


def test_released_slots_lose_their_tree_and_are_released_by_the_drafter() -> None:
    drafter = FixedDrafter({3: TREE, 4: TREE})
    source = source_of(drafter)
    source.submit(context(3, 4))
    source.release([3])
    assert collect(source, {3: 5, 4: 5}) == [root_only(5), TREE]
    assert drafter.released == [3]


def test_a_new_draft_replaces_the_previous_one() -> None:
    drafter = FixedDrafter({3: TREE})
    source = source_of(drafter)
    source.submit(context(3))
    drafter.trees = {3: TreeLists([5, 1], [NONE, 0])}
    source.submit(context(3))
    assert collect(source, {3: 5}) == [TreeLists([5, 1], [NONE, 0])]


def test_the_inputs_are_those_of_the_drafter() -> None:
    source = submitted({})
    assert (source.max_draft_tokens, source.aux_hidden_state_layers, source.reads_next_token) == (3, (1, 2), True)


def test_no_requests_give_no_trees() -> None:
    assert collect(submitted({}), {}) == []


def test_without_a_drafter_trees_have_only_roots() -> None:
    source = NoDrafts(NUM_SLOTS, CPU)
    source.submit(context(1))
    source.release([1])
    assert (source.max_draft_tokens, source.aux_hidden_state_layers, source.reads_next_token) == (0, (), False)
    assert source.seconds == 0.0
    assert collect(source, {1: 5, 2: 6}) == [root_only(5), root_only(6)]


def test_nan_logits_are_reported_and_affect_one_tree() -> None:
    class DrafterWithNan(FixedDrafter):
        def propose(self, context: ProposeContext) -> DraftTree:
            tree = super().propose(context)
            return DraftTree(tree.tokens, tree.parents, torch.tensor([0, 4]), tree.max_depth)

    source = source_of(DrafterWithNan({3: TREE, 4: TREE}))
    source.submit(context(3, 4))
    assert collect(source, {3: 5, 4: 5}) == [root_only(5), TREE]
    assert source.take_report().faults == [DraftFault.NOT_A_NUMBER]
    assert source.take_report().faults == []


def test_draft_probabilities_are_returned_with_their_trees() -> None:
    pending = PendingTrees(NUM_SLOTS, VOCAB_SIZE, CPU)
    drafted = DraftTree.from_lists([TREE, TREE])
    probs = torch.rand(2, 4, VOCAB_SIZE)
    tree = DraftTree(drafted.tokens, drafted.parents, drafted.num_nodes, drafted.max_depth, probs)
    pending.put(torch.tensor([3, 1]), tree)
    taken, _ = pending.take(torch.tensor([1, 2, 3]), torch.tensor([5, 5, 5]), [UNLIMITED] * 3).wait_for_sizes()
    assert taken.draft_probs is not None
    assert torch.equal(taken.draft_probs, torch.stack((probs[1], torch.zeros(4, VOCAB_SIZE), probs[0])))


@pytest.mark.parametrize(
    ("parents", "are_chains"),
    [
        ([[-1, 0, 1], [-1, 0, 1]], True),
        ([[-1, 0, 1], [-1, 0, 0]], False),
        ([[-1, 0, 1], [-1, 0, 2]], True),  # invalid, so that only its root is verified
        ([[-1, 0, 1], [-1]], True),
    ],
)
def test_chains_are_recognised_whatever_the_drafter_says(parents: list[list[int]], are_chains: bool) -> None:
    """Attention treats them as causal, so a tree that only claims to be one would be verified wrongly."""
    tree = DraftTree.from_lists([TreeLists([5] * len(row), row) for row in parents])._replace(are_chains=True)
    pending = PendingTrees(NUM_SLOTS, VOCAB_SIZE, CPU)
    pending.put(torch.tensor([1, 2]), tree)
    taken, _ = pending.take(torch.tensor([1, 2]), torch.tensor([5, 5]), [UNLIMITED] * 2).wait_for_sizes()
    assert taken.are_chains == are_chains
