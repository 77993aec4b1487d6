"""What the target would have accepted of a tree follows from the text."""

from dataclasses import replace

import pytest
import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.propose_context import DraftRequest
from specray.spec_decode.shadow_trees import Compared, ShadowTrees, accepted_path
from specray.step import UNLIMITED, DraftLimit
from tests.support.drafters import Tokens, make_context

#        9
#     7     5
#    6 4    3
TREE = TreeLists([9, 7, 5, 6, 4, 3], [NONE, 0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], (0, False)),
        ([8], (0, True)),
        ([7], (1, False)),
        ([7, 4], (2, True)),
        ([7, 4, 1], (2, True)),
        ([7, 3], (1, True)),
        ([5, 3, 3], (2, True)),
    ],
)
def test_the_accepted_path_is_that_of_the_text(text: list[int], expected: tuple[int, bool]) -> None:
    assert accepted_path(TREE, text) == expected


def test_the_first_of_equal_siblings_counts() -> None:
    """As in verification."""
    assert accepted_path(TreeLists([9, 7, 7, 5], [NONE, 0, 0, 2]), [7, 5]) == (1, True)


def test_a_tree_without_drafts_is_known_at_once() -> None:
    assert accepted_path(TreeLists([9], [NONE]), [1]) == (0, True)


def kept(limit: DraftLimit = UNLIMITED, tree: TreeLists = TREE, scores: list[float] | None = None) -> ShadowTrees:
    trees = ShadowTrees()
    drafted = DraftTree.from_lists([tree])
    if scores is not None:
        drafted = drafted._replace(scores=torch.tensor([scores]))
    trees.keep([DraftRequest(0, 0, 2, limit)], drafted)
    return trees


def test_trees_wait_until_the_text_is_long_enough() -> None:
    trees = kept()
    assert trees.compare(make_context([Tokens(0, [1, 2, 9])])) == Compared(0, 0, 0)
    assert trees.compare(make_context([Tokens(0, [1, 2, 9, 7])])) == Compared(0, 0, 0)
    assert trees.compare(make_context([Tokens(0, [1, 2, 9, 7, 4])])) == Compared(1, 5, 2)
    assert trees.compare(make_context([Tokens(0, [1, 2, 9, 7, 4])])) == Compared(0, 0, 0), "counted once"


def test_nodes_that_would_not_have_been_verified_do_not_count() -> None:
    assert kept(DraftLimit(9, 1)).compare(make_context([Tokens(0, [1, 2, 9, 7, 4])])) == Compared(1, 2, 1)
    assert kept(DraftLimit(2, 9)).compare(make_context([Tokens(0, [1, 2, 9, 7, 4])])) == Compared(1, 2, 1)


def test_unlikely_nodes_would_not_have_been_verified() -> None:
    scores, text = [1.0, 0.8, 0.5, 0.4, 0.2, 0.1], make_context([Tokens(0, [1, 2, 9, 7, 4])])
    assert kept(DraftLimit(9, 9, 0.4), scores=scores).compare(text) == Compared(1, 3, 1)
    assert kept(DraftLimit(9, 9, 0.2), scores=scores).compare(text) == Compared(1, 4, 2)


def test_a_tree_without_drafts_counts_where_drafts_are_allowed() -> None:
    """Otherwise a drafter that rarely finds anything would look better than it is."""
    root, text = TreeLists([9], [NONE]), make_context([Tokens(0, [1, 2, 9, 7, 4])])
    assert kept(tree=root).compare(text) == Compared(1, 0, 0)
    assert kept(DraftLimit(0, 9), root).compare(text) == Compared(0, 0, 0)
    assert kept(DraftLimit(9, 9, 1.1), scores=[1.0, 0.8, 0.5, 0.4, 0.2, 0.1]).compare(text) == Compared(1, 0, 0)
    assert kept(tree=TreeLists([], [])).compare(text) == Compared(0, 0, 0), "its logits were not finite"


def test_a_new_request_in_the_slot_is_not_compared() -> None:
    trees = kept()
    trees.release([0])
    assert trees.compare(make_context([Tokens(0, [1, 2, 9, 7, 4])])) == Compared(0, 0, 0)


def test_finished_requests_are_compared_with_the_trees_verified_in_their_place() -> None:
    """The shadow's tree has two of the text's tokens; of the verified ones the text shows how many were accepted."""
    trees, text = ShadowTrees(), [1, 2, 9, 7, 4, 8, 8, 8]

    def step(start: int, end: int, known: int, *, drafts: bool) -> Compared:
        context = make_context([Tokens(0, text[:known])])
        request = DraftRequest(0, start, end, UNLIMITED)
        counts = trees.compare(replace(context, requests=[request]))
        if drafts:
            trees.keep([request], DraftTree.from_lists([TREE]))
        return counts

    step(0, 2, 3, drafts=True)  # the root is the 9 at position 2
    assert step(2, 3, 4, drafts=False).num_trees == 0  # the text is too short for the tree; nothing was verified
    assert step(3, 7, 8, drafts=True) == Compared(1, 5, 2)
    step(7, 8, 8, drafts=False)
    trees.release([0])
    ended = trees.compare(make_context([]))
    assert ended == Compared(0, 0, 0, num_requests=1, num_pairs=1, gain=2, gain_squares=4)
    assert trees.compare(make_context([])) == Compared(0, 0, 0), "counted once"


def test_a_tree_that_was_followed_by_steps_without_the_drafter_is_not_compared() -> None:
    trees, text = kept(), make_context([Tokens(0, [1, 2, 9, 7, 4, 1, 1])])
    assert trees.compare(replace(text, requests=[DraftRequest(0, 4, 6, UNLIMITED)])) == Compared(1, 5, 2)
    trees.release([0])
    assert trees.compare(make_context([])) == Compared(0, 0, 0)
