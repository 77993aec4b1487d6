"""What stands between a drafter and the target: trees are cut, matched to their row and forgotten in time."""

from collections.abc import Sequence

from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.spec_decode.drafter import DraftRow, InlineDrafts, ProposeContext

TREE = RowTree([7, 1, 2, 3], [NONE, 0, 1, 0])
BARE = RowTree([7], [NONE])


class Fixed:
    """Always the same tree."""

    max_draft_tokens = 3

    def __init__(self) -> None:
        self.released: list[int] = []

    def propose(self, context: ProposeContext) -> DraftTree:
        return DraftTree.of([TREE] * len(context.rows))

    def release(self, slots: Sequence[int]) -> None:
        self.released += slots


def drafted(*slots: int) -> tuple[InlineDrafts, Fixed]:
    drafter = Fixed()
    drafts = InlineDrafts(drafter)
    drafts.submit(ProposeContext([DraftRow(slot, [5, 7], 1, "") for slot in slots]))
    return drafts, drafter


def test_each_row_gets_its_tree_cut_to_its_limit() -> None:
    drafts, _ = drafted(0, 1, 2)
    trees = drafts.collect([(2, 7), (0, 7), (1, 7)], [3, 1, 0]).rows()
    assert trees == [TREE, RowTree([7, 1], [NONE, 0]), BARE]


def test_a_tree_for_another_last_token_is_not_used() -> None:
    drafts, _ = drafted(0)
    assert drafts.collect([(0, 8)], [3]).rows() == [RowTree([8], [NONE])]


def test_a_tree_is_used_once() -> None:
    drafts, _ = drafted(0)
    assert drafts.collect([(0, 7)], [3]).rows() == [TREE]
    assert drafts.collect([(0, 7)], [3]).rows() == [BARE]


def test_a_freed_slot_has_no_tree() -> None:
    drafts, drafter = drafted(0, 1)
    drafts.release([0])
    assert drafter.released == [0]
    assert drafts.collect([(0, 7), (1, 7)], [3, 3]).rows() == [BARE, TREE]


def test_without_a_drafter_every_tree_is_a_root() -> None:
    drafts = InlineDrafts(None)
    drafts.submit(ProposeContext([DraftRow(0, [5, 7], 1, "")]))
    drafts.release([3])
    assert drafts.max_draft_tokens == 0
    assert drafts.collect([(0, 7)], [5]).rows() == [BARE]
