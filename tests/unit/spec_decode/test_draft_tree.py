"""Operations on trees, compared with loops over parents."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.tree_edits import limit_depth, replace_trees


@st.composite
def row_trees(draw: st.DrawFn, max_draft_tokens: int = 20) -> TreeLists:
    """Any tree: a node's parent is any earlier node."""
    size = draw(st.integers(0, max_draft_tokens))
    parents = [NONE] + [draw(st.integers(0, node)) for node in range(size)]
    return TreeLists(draw(st.lists(st.integers(0, 99), min_size=size + 1, max_size=size + 1)), parents)


batches = st.lists(row_trees(), min_size=1, max_size=4)


def depths_of(rows: list[TreeLists]) -> list[list[int]]:
    return (DraftTree.from_lists(rows).ancestors().sum(-1) - 1).tolist()


def is_valid(tree: TreeLists) -> bool:
    return bool(DraftTree.from_lists([tree]).is_valid(vocab_size=100)[0])


def path_to_root(tree: TreeLists, node: int) -> list[int]:
    path = [node]
    while tree.parents[path[-1]] != NONE:
        path.append(tree.parents[path[-1]])
    return path


@given(batches)
def test_lists_survive_the_conversion_to_tensors_and_back(rows: list[TreeLists]) -> None:
    tree = DraftTree.from_lists(rows)
    assert tree.to_lists() == rows
    assert tree.num_nodes.tolist() == [len(row.tokens) for row in rows]


@given(batches)
def test_ancestors_are_the_nodes_on_the_path_to_the_root(rows: list[TreeLists]) -> None:
    ancestors = DraftTree.from_lists(rows).ancestors()
    for row, mask in zip(rows, ancestors, strict=True):
        for node in range(len(row.tokens)):
            assert mask[node].nonzero().flatten().tolist() == sorted(path_to_root(row, node))


@given(batches)
def test_depth_is_the_number_of_edges_to_the_root(rows: list[TreeLists]) -> None:
    for row, depths in zip(rows, depths_of(rows), strict=True):
        assert depths[: len(row.tokens)] == [len(path_to_root(row, n)) - 1 for n in range(len(row.tokens))]


@given(batches)
def test_padding_is_minus_one(rows: list[TreeLists]) -> None:
    tree = DraftTree.from_lists(rows)
    for index, row in enumerate(rows):
        assert (tree.tokens[index, len(row.tokens) :] == NONE).all()
        assert (tree.parents[index, len(row.tokens) :] == NONE).all()


@given(row_trees(), st.integers(1, 21))
def test_the_first_nodes_of_a_tree_are_a_tree(row: TreeLists, length: int) -> None:
    cut = TreeLists(row.tokens[:length], row.parents[:length])
    assert is_valid(cut)
    whole, part = DraftTree.from_lists([row]).ancestors()[0], DraftTree.from_lists([cut]).ancestors()[0]
    assert torch.equal(whole[:length, :length], part)


@given(row_trees())
def test_every_tree_with_parents_before_children_is_valid(row: TreeLists) -> None:
    assert is_valid(row)


@pytest.mark.parametrize("tokens", [[5, 1, 100], [5, -1, 2], [5, 1, 2**40]])
def test_a_token_outside_the_vocabulary_is_invalid(tokens: list[int]) -> None:
    assert not is_valid(TreeLists(tokens, [NONE, 0, 1]))


@pytest.mark.parametrize("parents", [[NONE, 0, 2], [NONE, 1, 0], [NONE, 2, 1], [NONE, NONE, 0], [NONE, 0, -7]])
def test_a_child_before_its_parent_is_invalid(parents: list[int]) -> None:
    assert not is_valid(TreeLists([5, 1, 2], parents))


def test_an_empty_batch() -> None:
    tree = DraftTree.from_lists([])
    assert tree.to_lists() == []
    assert tree.tokens.shape[0] == 0
    assert tree.ancestors().shape[0] == 0


def test_a_chain_of_64_drafts() -> None:
    rows = [TreeLists(list(range(65)), [NONE, *range(64)])]
    assert depths_of(rows) == [list(range(65))]
    assert torch.equal(DraftTree.from_lists(rows).ancestors()[0], torch.ones(65, 65).tril().bool())


def limited(tree: TreeLists, num_steps: int) -> TreeLists:
    """The tree without nodes deeper than `num_steps`."""
    kept = [node for node in range(len(tree.tokens)) if len(path_to_root(tree, node)) - 1 <= num_steps]
    parents = [NONE if tree.parents[node] == NONE else kept.index(tree.parents[node]) for node in kept]
    return TreeLists([tree.tokens[node] for node in kept], parents)


@given(batches, st.data())
def test_limiting_the_depth_keeps_the_order_of_nodes(rows: list[TreeLists], data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 6), min_size=len(rows), max_size=len(rows)))
    cut = limit_depth(DraftTree.from_lists(rows), torch.tensor(steps))
    assert cut.to_lists() == [limited(row, num_steps) for row, num_steps in zip(rows, steps, strict=True)]
    assert (cut.tokens[torch.arange(cut.tokens.shape[1]) >= cut.num_nodes[:, None]] == NONE).all()


@given(batches, batches, st.randoms(use_true_random=False))
def test_scattered_trees_replace_those_at_the_given_places(
    rows: list[TreeLists], others: list[TreeLists], random: Random
) -> None:
    places = random.sample(range(len(others)), min(len(rows), len(others)))
    rows = rows[: len(places)]
    merged = replace_trees(DraftTree.from_lists(others), torch.tensor(places), DraftTree.from_lists(rows))
    expected = list(others)
    for place, row in zip(places, rows, strict=True):
        expected[place] = row
    if len(places) < len(others):  # otherwise the trees are returned in their own order
        assert merged.to_lists() == expected


@given(batches, st.randoms(use_true_random=False))
def test_selected_trees_are_in_the_given_order(rows: list[TreeLists], random: Random) -> None:
    places = random.sample(range(len(rows)), random.randint(1, len(rows)))
    if len(places) < len(rows):
        selected = DraftTree.from_lists(rows).select(torch.tensor(places))
        assert selected.to_lists() == [rows[place] for place in places]


def test_trees_keep_their_scores_when_they_are_moved_or_selected() -> None:
    tree = DraftTree.chains(torch.tensor([[1, 2], [3, 4]]))._replace(scores=torch.tensor([[1.0, 0.5], [1.0, 0.2]]))
    for found, expected in (
        (tree.to(torch.device("cpu")), tree.scores),
        (tree.select(torch.tensor([1])), [[1.0, 0.2]]),
    ):
        torch.testing.assert_close(found.scores, torch.as_tensor(expected))
