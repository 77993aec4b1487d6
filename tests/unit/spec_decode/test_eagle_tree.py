"""EAGLE's dynamic tree, compared with a simple loop, also with tied scores and probabilities of 1."""

import logging
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.eagle_tree import CandidatePool
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape
from tests.support.naive_eagle import Distribution, naive_pool, naive_tree

# Products of powers of two are exact, so equal scores are tied. With 1.0, a child is tied with its parent.
PROBABILITIES = [1.0, 1.0, 0.5, 0.5, 0.25, 0.0]


def probs_of(seed: int, topk: int) -> Distribution:
    """A random distribution as a function of the path."""

    def probs(path: tuple[int, ...]) -> list[tuple[float, int]]:
        random = Random(f"{seed} {path}")
        values = sorted((random.choice(PROBABILITIES) for _ in range(topk)), reverse=True)
        return list(zip(values, random.sample(range(100), topk), strict=True))

    return probs


def grown(probs_list: list[Distribution], shape: TreeShape) -> CandidatePool:
    """The candidates of several rows. Children are looked up by the paths that the pool reports."""
    pool = CandidatePool.of_roots(*tensors([[probs(()) for probs in probs_list]], shape.topk))
    frontier = torch.arange(shape.topk).expand(len(probs_list), shape.topk)
    for level in range(1, shape.num_steps):
        children = [
            [probs(path_of(pool, row, index)) for index in frontier[row].tolist()]
            for row, probs in enumerate(probs_list)
        ]
        probs, tokens = tensors(children, shape.topk)
        scores = pool.scores.gather(1, frontier)[:, :, None] * probs.view(len(probs_list), shape.topk, shape.topk)
        pool.expand(frontier, scores, tokens.view(len(probs_list), shape.topk, shape.topk))
        if level + 1 < shape.num_steps:
            frontier = pool.best_of_last()
    return pool


def tensors(children: list[list[list[tuple[float, int]]]], topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = [pair for row in children for node in row for pair in node]
    scores, tokens = torch.tensor([p for p, _ in flat]), torch.tensor([token for _, token in flat])
    return scores.view(-1, topk), tokens.view(-1, topk)


def path_of(pool: CandidatePool, row: int, index: int) -> tuple[int, ...]:
    if index == NONE:
        return ()
    parent = int(pool.expanded[row, index // pool.topk])
    return (*path_of(pool, row, parent), int(pool.tokens[row, index]))


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    steps, topk = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    size = TreeShape(steps, topk, 2).pool_size
    return TreeShape(steps, topk, draw(st.integers(2, size + 1)))


@given(shapes(), st.integers(1, 8), st.integers(0, 10_000))
def test_a_limited_shape_has_the_best_nodes_of_the_whole_tree(shape: TreeShape, num_drafts: int, seed: int) -> None:
    probs, small = probs_of(seed, shape.topk), shape.limited(shape.num_steps, num_drafts)
    whole = naive_tree(naive_pool(probs, shape.num_steps, shape.topk), shape.num_draft_tokens - 1, 7)
    pool = naive_pool(lambda path: probs(path)[: small.topk], small.num_steps, small.topk)
    size = min(1 + num_drafts, shape.num_draft_tokens)
    assert small.num_draft_tokens == size
    assert naive_tree(pool, size - 1, 7) == TreeLists(whole.tokens[:size], whole.parents[:size])


@given(shapes(), st.lists(st.integers(0, 10_000), min_size=1, max_size=3))
@settings(max_examples=150)
def test_candidates_and_tree_equal_the_reference(shape: TreeShape, seeds: list[int]) -> None:
    probs_list = [probs_of(seed, shape.topk) for seed in seeds]
    pool = grown(probs_list, shape)
    roots = list(range(1000, 1000 + len(probs_list)))
    naive = [naive_pool(probs, shape.num_steps, shape.topk) for probs in probs_list]
    assert pool.scores.tolist() == [[candidate.score for candidate in row] for row in naive]
    assert pool.tokens.tolist() == [[candidate.path[-1] for candidate in row] for row in naive]
    drafts = shape.num_draft_tokens - 1
    expected = [naive_tree(candidates, drafts, root) for candidates, root in zip(naive, roots, strict=True)]
    assert pool.tree(torch.tensor(roots), drafts).to_lists() == expected


@given(shapes(), st.integers(0, 10_000))
@example(TreeShape(5, 3, 5), 0)
@settings(max_examples=100)
def test_parents_are_included_and_precede_their_children(shape: TreeShape, seed: int) -> None:
    probs = probs_of(seed, shape.topk)
    [tree] = grown([probs], shape).tree(torch.tensor([7]), shape.num_draft_tokens - 1).to_lists()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, shape.num_draft_tokens):
        assert 0 <= tree.parents[node] < node
        parent_path = paths[tree.parents[node]]
        assert tree.tokens[node] in [token for _, token in probs(parent_path)]
        paths.append((*parent_path, tree.tokens[node]))
    assert len(set(paths)) == len(paths)


@given(shapes(), st.integers(0, 10_000))
@settings(max_examples=50)
def test_the_first_nodes_are_the_best_smaller_tree(shape: TreeShape, seed: int) -> None:
    pool = grown([probs_of(seed, shape.topk)], shape)
    [whole] = pool.tree(torch.tensor([7]), shape.num_draft_tokens - 1).to_lists()
    for size in range(1, shape.num_draft_tokens):
        [smaller] = pool.tree(torch.tensor([7]), size - 1).to_lists()
        assert smaller == TreeLists(whole.tokens[:size], whole.parents[:size])


def test_the_first_of_tied_candidates_is_selected() -> None:
    """With all scores equal, the tree consists of the first candidates, and parents precede their children."""
    shape = TreeShape(3, 2, 6)
    probs = probs_from({(): [(1.0, 10), (1.0, 20)]}, default=[(1.0, 1), (1.0, 2)])
    [tree] = grown([probs], shape).tree(torch.tensor([0]), 5).to_lists()
    assert tree == TreeLists([0, 10, 20, 1, 2, 1], [NONE, 0, 0, 1, 1, 2])


def test_the_frontier_is_expanded_in_order_of_score() -> None:
    probs_list = {(): [(0.5, 10), (0.5, 20)], (10,): [(0.25, 1), (0.125, 2)], (20,): [(0.5, 3), (0.0, 4)]}
    pool = grown([probs_from(probs_list, default=[(1.0, 5), (1.0, 6)])], TreeShape(3, 2, 2))
    assert pool.expanded.tolist() == [[NONE, 0, 1, 4, 2]]
    assert [path_of(pool, 0, index) for index in (6, 8)] == [(20, 3, 5), (10, 1, 5)]


def probs_from(table: dict[tuple[int, ...], list[tuple[float, int]]], default: list[tuple[float, int]]) -> Distribution:
    return lambda path: table.get(path, default)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_topk_of_1_gives_a_chain(num_steps: int) -> None:
    shape = TreeShape(num_steps, 1, num_steps + 1)
    trees = grown([probs_of(seed, 1) for seed in (1, 2)], shape).tree(torch.tensor([8, 9]), num_steps)
    assert isinstance(trees, DraftTree)
    assert trees.parents.tolist() == [[NONE, *range(num_steps)]] * 2
    assert trees.tokens[:, 0].tolist() == [8, 9]


# ---- sizes ----------------------------------------------------------------------------------------------------------


def shape_of(
    steps: int | None, topk: int | None, nodes: int | None, architecture: str = "LlamaForCausalLM"
) -> TreeShape:
    config = SpeculativeConfig(algorithm="EAGLE3", num_steps=steps, eagle_topk=topk, num_draft_tokens=nodes)
    return configured_shape(config, architecture)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("LlamaForCausalLM", TreeShape(5, 4, 8)), ("Qwen3ForCausalLM", TreeShape(3, 1, 4)), ("", TreeShape(3, 1, 4))],
)
def test_default_sizes_depend_on_the_architecture(architecture: str, shape: TreeShape) -> None:
    assert shape_of(None, None, None, architecture) == shape


@pytest.mark.parametrize("bits", range(1, 7))
def test_setting_some_of_the_three_sizes_is_refused(bits: int) -> None:
    sizes = [value if bits >> bit & 1 else None for bit, value in enumerate((3, 2, 4))]
    missing = ", ".join(
        name for name, size in zip(("num_steps", "eagle_topk", "num_draft_tokens"), sizes, strict=True) if size is None
    )
    with pytest.raises(ConfigError, match=f"{missing} is not set; set all three, or none"):
        shape_of(*sizes)


def test_num_draft_tokens_of_a_chain_is_num_steps_plus_1(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert shape_of(4, 1, 5) == TreeShape(4, 1, 5)
        assert not caplog.records
        assert shape_of(4, 1, 16) == TreeShape(4, 1, 5)
    [record] = caplog.records
    assert "num_draft_tokens=16 becomes num_steps + 1 = 5" in record.getMessage()


@pytest.mark.parametrize(("steps", "topk", "size"), [(1, 4, 4), (2, 4, 20), (3, 2, 10), (2, 1, 2)])
def test_num_draft_tokens_is_limited_to_the_number_of_candidates(
    steps: int, topk: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        full = shape_of(steps, topk, size + 1)
        assert not caplog.records
        assert full.pool_size == size
        assert shape_of(steps, topk, size + 2) == full
    if topk > 1:
        [record] = caplog.records
        assert f"{size} candidates: num_draft_tokens={size + 2} becomes {size + 1}" in record.getMessage()
