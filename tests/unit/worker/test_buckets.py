"""Which bucket of graphs a step takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from specray.step import DraftLimit
from specray.worker.buckets import Bucket, buckets
from specray.worker.decode_graphs import DecodeGraphs


@pytest.mark.parametrize(
    ("rows", "nodes", "num_drafts", "expected"),
    [
        (1, 1, 0, Bucket(1, 1)),
        (1, 1, 7, Bucket(1, 8)),  # its graph drafts as many nodes as it has
        (3, 8, 3, Bucket(4, 8)),
        (64, 4, 3, Bucket(64, 4)),
        (64, 3, 2, Bucket(64, 3)),  # a chain of 2 pays in large batches only
        (16, 3, 2, Bucket(16, 4)),
        (200, 1, 7, Bucket(200, 1)),  # no bucket has so many rows of 8 nodes
        (200, 8, 7, None),
    ],
)
def test_a_bucket_has_room_for_a_step_and_the_drafts_after_it(
    rows: int, nodes: int, num_drafts: int, expected: Bucket | None
) -> None:
    nothing: Any = None
    drafts: Any = SimpleNamespace(max_draft_tokens=7, aux_hidden_state_layers=())
    graphs = DecodeGraphs(nothing, nothing, nothing, drafts, 200, drafts, nothing)
    graphs._max_nodes, graphs._buckets = 8, buckets(200, 8)
    batch: Any = SimpleNamespace(only_decodes=True, num_nodes=[nodes] * rows)
    limits = [DraftLimit(num_drafts, num_drafts)] * rows if num_drafts else []
    assert graphs.bucket(batch, limits) == expected
