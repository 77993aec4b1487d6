"""Rows and trees flattened into one batch, against what each row is by itself."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specray.ops.sampling import SamplerRow
from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.step import ScheduledRow
from specray.worker.input_batch import InputBatch, build_batch, count_known, sampling_rows
from specray.worker.request_state import Row
from tests.support.distributions import OPTIONS

CPU = torch.device("cpu")


@st.composite
def rows_and_trees(draw: st.DrawFn) -> tuple[list[Row], list[int], list[RowTree]]:
    """Rows, how many known tokens each may compute, and a tree for each that computes all of them."""
    rows, limits, trees = [], [], []
    for slot in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
        computed = draw(st.integers(0, len(tokens) - 1))
        limits.append(draw(st.integers(1, 10)))
        sampler = SamplerRow(OPTIONS)
        rows.append(Row(slot, tokens, 1, computed, np.arange(100 * slot + 16, 100 * slot + 50), sampler, ""))
        if limits[-1] >= len(tokens) - computed:
            size = draw(st.integers(0, 6))
            parents = [NONE] + [draw(st.integers(0, node)) for node in range(size)]
            trees.append(RowTree([tokens[-1], *range(60, 60 + size)], parents))
    return rows, limits, trees


def flattened(case: tuple[list[Row], list[int], list[RowTree]]) -> InputBatch:
    rows, limits, trees = case
    known = count_known([ScheduledRow(row.slot, limit, 9, []) for row, limit in zip(rows, limits, strict=True)], rows)
    return build_batch(rows, known, sampling_rows(rows, known), DraftTree.of(trees), CPU)


@given(rows_and_trees())
def test_tokens_positions_and_slots_are_each_rows_own(case: tuple[list[Row], list[int], list[RowTree]]) -> None:
    rows, limits, trees = case
    batch, rest = flattened(case), iter(trees)
    tokens, positions, slots = [], [], []
    for row, limit in zip(rows, limits, strict=True):
        known = row.token_ids[row.num_computed_tokens :][:limit]
        start, end = row.num_computed_tokens, row.num_computed_tokens + len(known)
        tree = next(rest) if end == len(row.token_ids) else RowTree([0], [NONE])
        depths = [0]
        for parent in tree.parents[1:]:
            depths.append(depths[parent] + 1)
        tokens += known + tree.tokens[1:]
        positions += [*range(start, end), *(end - 1 + depth for depth in depths[1:])]
        slots += row.kv_slots[start : end + len(tree.tokens) - 1].tolist()
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.attention.slot_mapping.tolist() == slots


@given(rows_and_trees())
def test_nodes_are_found_again_in_the_batch(case: tuple[list[Row], list[int], list[RowTree]]) -> None:
    batch = flattened(case)
    at_nodes = batch.token_ids[batch.node_index].tolist()
    assert at_nodes == [token for tree in case[2] for token in tree.tokens]
    for row, known, place in zip(batch.rows, batch.num_known, batch.last_index.tolist(), strict=True):
        assert int(batch.token_ids[place]) == row.token_ids[row.num_computed_tokens + known - 1]
