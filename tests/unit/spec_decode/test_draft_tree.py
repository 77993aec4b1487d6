"""What follows from a tree's shape, against loops that walk parents one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree


@st.composite
def row_trees(draw: st.DrawFn, max_drafts: int = 20) -> RowTree:
    """Any tree: each node's parent is any earlier node."""
    size = draw(st.integers(0, max_drafts))
    parents = [NONE] + [draw(st.integers(0, node)) for node in range(size)]
    return RowTree(draw(st.lists(st.integers(0, 99), min_size=size + 1, max_size=size + 1)), parents)


batches = st.lists(row_trees(), min_size=1, max_size=4)


def path_to_root(tree: RowTree, node: int) -> list[int]:
    path = [node]
    while tree.parents[path[-1]] != NONE:
        path.append(tree.parents[path[-1]])
    return path


@given(batches)
def test_rows_come_back_as_they_went_in(rows: list[RowTree]) -> None:
    tree = DraftTree.of(rows)
    assert tree.rows() == rows
    assert tree.num_nodes == [len(row.tokens) for row in rows]


@given(batches)
def test_a_node_sees_itself_and_its_ancestors(rows: list[RowTree]) -> None:
    ancestors = DraftTree.of(rows).ancestors()
    for row, mask in zip(rows, ancestors, strict=True):
        for node in range(len(row.tokens)):
            assert mask[node].nonzero().flatten().tolist() == sorted(path_to_root(row, node))


@given(batches)
def test_depth_counts_the_edges_to_the_root(rows: list[RowTree]) -> None:
    for row, depths in zip(rows, DraftTree.of(rows).depths().tolist(), strict=True):
        assert depths[: len(row.tokens)] == [len(path_to_root(row, n)) - 1 for n in range(len(row.tokens))]


@given(batches)
def test_past_a_rows_end_there_is_nothing(rows: list[RowTree]) -> None:
    tree = DraftTree.of(rows)
    for index, row in enumerate(rows):
        assert (tree.tokens[index, len(row.tokens) :] == NONE).all()
        assert (tree.parents[index, len(row.tokens) :] == NONE).all()


@given(row_trees(), st.integers(1, 21))
def test_any_cut_of_a_tree_is_a_tree(row: RowTree, length: int) -> None:
    cut = RowTree(row.tokens[:length], row.parents[:length])
    assert cut.or_root(vocab_size=100) == cut
    whole, part = DraftTree.of([row]).ancestors()[0], DraftTree.of([cut]).ancestors()[0]
    assert torch.equal(whole[:length, :length], part)


@given(row_trees())
def test_a_sound_tree_is_taken_as_it_is(row: RowTree) -> None:
    assert row.or_root(vocab_size=100) is row


@pytest.mark.parametrize("tokens", [[5, 1, 100], [5, -1, 2], [5, 1, 2**40]])
def test_of_a_tree_with_a_foreign_token_the_root_remains(tokens: list[int]) -> None:
    assert RowTree(tokens, [NONE, 0, 1]).or_root(vocab_size=100) == RowTree([5], [NONE])


@pytest.mark.parametrize("parents", [[NONE, 0, 2], [NONE, 1, 0], [NONE, 2, 1], [NONE, NONE, 0], [NONE, 0, -7]])
def test_of_a_tree_whose_parents_do_not_come_first_the_root_remains(parents: list[int]) -> None:
    assert RowTree([5, 1, 2], parents).or_root(vocab_size=100) == RowTree([5], [NONE])


def test_a_batch_of_no_rows_is_a_tree_of_none() -> None:
    tree = DraftTree.of([])
    assert tree.rows() == []
    assert tree.tokens.shape[0] == 0
    assert tree.depths().shape[0] == 0


def test_the_deepest_chain_has_full_depth() -> None:
    rows = [RowTree(list(range(65)), [NONE, *range(64)])]
    assert DraftTree.of(rows).depths().tolist() == [list(range(65))]
    assert torch.equal(DraftTree.of(rows).ancestors()[0], torch.ones(65, 65).tril().bool())
