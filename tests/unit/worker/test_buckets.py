"""Which buckets of graphs a step and its drafts take, and how many of their nodes are padding."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from specray.step import DraftLimit
from specray.worker.buckets import Bucket, buckets, draft_buckets, smallest_bucket
from specray.worker.decode_graphs import DecodeGraphs


def graphs_of(max_rows: int, max_nodes: int) -> DecodeGraphs:
    nothing: Any = None
    drafts: Any = SimpleNamespace(max_draft_tokens=max_nodes - 1, aux_hidden_state_layers=())
    graphs = DecodeGraphs(nothing, nothing, nothing, drafts, max_rows, drafts, nothing)
    graphs._max_nodes, graphs._buckets = max_nodes, buckets(max_rows, max_nodes)
    graphs._draft_buckets = draft_buckets(max_rows, max_nodes)
    return graphs


def step_of(num_nodes: list[int]) -> Any:
    return SimpleNamespace(rows=SimpleNamespace(only_decode=True), num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("num_nodes", "expected"),
    [
        ([1], Bucket(1, 1, 1)),
        ([1] * 60, Bucket(64, 64, 1)),
        ([8], Bucket(1, 8, 8)),
        ([8] * 3, Bucket(4, 32, 8)),
        ([8] * 8 + [1] * 56, Bucket(64, 128, 8)),
        ([4] * 64, Bucket(64, 256, 8)),
        ([2, 1], Bucket(4, 4, 8)),
        ([8] * 128, Bucket(200, 1024, 8)),
        ([8] * 129, None),
    ],
)
def test_a_bucket_has_room_for_all_nodes_of_a_step(num_nodes: list[int], expected: Bucket | None) -> None:
    assert graphs_of(200, 8).bucket(step_of(num_nodes)) == expected


@pytest.mark.parametrize(
    ("rows", "nodes", "num_drafts", "expected"),
    [
        (1, 1, 0, None),
        (1, 1, 7, Bucket(1, 8, 8)),
        (3, 8, 3, Bucket(4, 32, 8)),  # it reads as many committed tokens
        (64, 4, 3, Bucket(64, 256, 4)),
        (64, 3, 2, Bucket(64, 192, 3)),  # a chain of 2 pays in large batches only
        (16, 3, 2, Bucket(16, 64, 4)),
        (200, 1, 7, Bucket(200, 600, 3)),  # no bucket has so many rows of 8 nodes
        (200, 8, 7, None),
    ],
)
def test_a_drafter_has_a_bucket_of_equal_trees(rows: int, nodes: int, num_drafts: int, expected: Bucket | None) -> None:
    limits = [DraftLimit(num_drafts, num_drafts)] * rows if num_drafts else []
    assert graphs_of(200, 8)._draft_bucket(step_of([nodes] * rows), limits) == expected


def test_what_a_drafter_makes_has_a_bucket() -> None:
    for max_rows, max_nodes in ((1, 8), (3, 13), (48, 8), (200, 32)):
        for drafted in draft_buckets(max_rows, max_nodes):
            taken = smallest_bucket(buckets(max_rows, max_nodes), drafted.rows, drafted.nodes, drafted.tokens)
            assert taken is not None
            assert taken.rows >= drafted.rows  # a drafter reads the outcome of all its rows


@pytest.mark.parametrize(
    ("num_rows", "max_nodes", "num_nodes", "most"),
    [
        (64, 16, lambda random: random.randint(1, 16), 32),  # merged trees; as equal ones they had 483
        (64, 8, lambda random: 8 if random.random() < 0.125 else 1, 32),  # some requests with chains of 7; 392
        (64, 8, lambda _: 4, 0),
    ],
)
def test_few_nodes_of_a_step_are_padding(
    num_rows: int, max_nodes: int, num_nodes: Callable[[Random], int], most: int
) -> None:
    """On average, of 300 random steps."""
    graphs, random, padding = graphs_of(num_rows, max_nodes), Random(0), 0
    for _ in range(300):
        step = [num_nodes(random) for _ in range(num_rows)]
        bucket = graphs.bucket(step_of(step))
        assert bucket is not None
        padding += bucket.tokens - sum(step)
    assert padding <= 300 * most


def test_the_number_of_graphs_is_bounded() -> None:
    assert [len(buckets(rows, nodes)) for rows, nodes in ((1, 1), (1, 8), (48, 8), (200, 1), (200, 8))] == [
        1,
        4,
        28,
        28,
        64,
    ]
