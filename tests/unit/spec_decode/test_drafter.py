"""Drafts made inline: taken once, only for the token they were made for, and never beyond the limit."""

from collections.abc import Sequence

from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.spec_decode.drafter import InlineDrafts, ProposeContext, cut_tree
from specray.step import UNLIMITED, DraftLimit
from tests.support.drafters import draft_row

TREE = RowTree([5, 6, 7, 8], [NONE, 0, 0, 2])


class CannedDrafter:
    """Gives each slot the tree it was told to."""

    max_draft_tokens = 3
    aux_hidden_state_layers = (1, 2)
    reads_next_token = True

    def __init__(self, trees: dict[int, RowTree]) -> None:
        self.trees = trees
        self.released: list[int] = []

    def propose(self, context: ProposeContext) -> DraftTree:
        return DraftTree.of([self.trees[row.slot] for row in context.rows])

    def release(self, slots: Sequence[int]) -> None:
        self.released += slots


def drafts_of(trees: dict[int, RowTree]) -> InlineDrafts:
    """A source that has drafted for all slots of `trees`."""
    source = InlineDrafts(CannedDrafter(trees))
    source.submit(context(*trees))
    return source


def context(*slots: int) -> ProposeContext:
    return ProposeContext([draft_row(slot, [1, 5], 1) for slot in slots])


def bare(root: int) -> RowTree:
    return RowTree([root], [NONE])


def test_trees_are_given_to_the_rows_they_were_made_for() -> None:
    source = drafts_of({3: TREE, 1: RowTree([9, 2], [NONE, 0])})
    assert source.collect([(1, 9), (3, 5), (2, 4)], [UNLIMITED] * 3).rows() == [
        RowTree([9, 2], [NONE, 0]),
        TREE,
        bare(4),
    ]


def test_a_tree_with_another_root_is_dropped_for_good() -> None:
    source = drafts_of({3: TREE})
    assert source.collect([(3, 6)], [UNLIMITED]).rows() == [bare(6)]
    assert source.collect([(3, 5)], [UNLIMITED]).rows() == [bare(5)]


def test_a_tree_is_given_once() -> None:
    source = drafts_of({3: TREE})
    source.collect([(3, 5)], [UNLIMITED])
    assert source.collect([(3, 5)], [UNLIMITED]).rows() == [bare(5)]


def test_a_tree_is_cut_to_its_rows_limit() -> None:
    for limit in range(5):
        [row] = drafts_of({3: TREE}).collect([(3, 5)], [UNLIMITED._replace(num_tokens=limit)]).rows()
        assert row == RowTree(TREE.tokens[: limit + 1], TREE.parents[: limit + 1])


def test_a_tree_loses_its_lower_levels_first() -> None:
    tree = RowTree([5, 1, 2, 3, 4, 6], [NONE, 0, 1, 2, 0, 4])
    cuts = {0: bare(5), 1: RowTree([5, 1, 4], [NONE, 0, 0]), 2: RowTree([5, 1, 2, 4, 6], [NONE, 0, 1, 0, 3]), 3: tree}
    for num_steps, expected in cuts.items():
        assert cut_tree(tree, 5, UNLIMITED._replace(num_steps=num_steps)) == expected
    assert cut_tree(tree, 5, DraftLimit(3, 2)) == RowTree([5, 1, 2, 4], [NONE, 0, 1, 0])


def test_a_released_slots_tree_is_gone_and_its_drafter_told() -> None:
    drafter = CannedDrafter({3: TREE, 4: TREE})
    source = InlineDrafts(drafter)
    source.submit(context(3, 4))
    source.release([3])
    assert source.collect([(3, 5), (4, 5)], [UNLIMITED] * 2).rows() == [bare(5), TREE]
    assert drafter.released == [3]


def test_the_newest_draft_of_a_slot_counts() -> None:
    drafter = CannedDrafter({3: TREE})
    source = InlineDrafts(drafter)
    source.submit(context(3))
    drafter.trees = {3: RowTree([5, 1], [NONE, 0])}
    source.submit(context(3))
    assert source.collect([(3, 5)], [UNLIMITED]).rows() == [RowTree([5, 1], [NONE, 0])]


def test_a_source_wants_what_its_drafter_wants() -> None:
    source = drafts_of({})
    assert (source.max_draft_tokens, source.aux_hidden_state_layers, source.reads_next_token) == (3, (1, 2), True)


def test_no_rows_give_no_trees() -> None:
    source = drafts_of({})
    assert source.collect([], []).rows() == []


def test_without_a_drafter_every_tree_is_its_root() -> None:
    source = InlineDrafts(None)
    source.submit(context(1))
    source.release([1])
    assert (source.max_draft_tokens, source.aux_hidden_state_layers, source.reads_next_token) == (0, (), False)
    assert source.seconds == 0.0
    assert source.collect([(1, 5), (2, 6)], [UNLIMITED] * 2).rows() == [bare(5), bare(6)]
