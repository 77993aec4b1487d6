"""Requests and their trees flattened into one batch, compared with each request alone."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.request_table import RequestTable
from specray.step import UNLIMITED, NewRequest, ScheduledRequest, StepPlan
from specray.worker.input_batch import InputBatch, ScheduledBatch, StepBatch, build_batch
from tests.support.distributions import OPTIONS

CPU = torch.device("cpu")
NUM_SLOTS, PAGE_SIZE, MAX_TOKENS = 6, 4, 24


@pytest.fixture(autouse=True, scope="module", params=["auto", "torch"])
def kernels_of_the_step(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test with the CPU kernels and with torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAY_KERNELS", request.param)
        yield


class Case(NamedTuple):
    """One request of the batch."""

    slot: int
    token_ids: list[int]
    num_computed: int
    num_tokens: int  # scheduled
    tree: TreeLists  # the root alone unless the step computes all known tokens

    @property
    def known(self) -> list[int]:
        return self.token_ids[self.num_computed :][: self.num_tokens]

    @property
    def samples(self) -> bool:
        return self.num_computed + len(self.known) == len(self.token_ids)

    @property
    def blocks(self) -> list[int]:
        return list(range(1 + 8 * self.slot, 9 + 8 * self.slot))

    @property
    def kv_slots(self) -> list[int]:
        return [PAGE_SIZE * block + offset for block in self.blocks for offset in range(PAGE_SIZE)]


@st.composite
def cases(draw: st.DrawFn) -> list[Case]:
    rows = []
    for slot in draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, 4))]:
        tokens = draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
        computed, scheduled = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(1, 10))
        case = Case(slot, tokens, computed, scheduled, TreeLists([], []))
        size = draw(st.integers(0, 6)) if case.samples else 0
        parents = [NONE] + [draw(st.integers(0, node)) for node in range(size)]
        rows.append(case._replace(tree=TreeLists([case.known[-1], *range(60, 60 + size)], parents)))
    return rows


def flattened(rows: list[Case], collects_changes: bool = False) -> InputBatch:
    """`collects_changes`: the table is filled as on a GPU."""
    table = RequestTable(NUM_SLOTS, MAX_TOKENS, PAGE_SIZE, 100, CPU)
    if collects_changes:
        table._host_buffer = None
    entered = [NewRequest(row.slot, row.token_ids, 1, row.num_computed, row.blocks, OPTIONS, "") for row in rows]
    plan = StepPlan(1, [], entered, [ScheduledRequest(row.slot, row.num_tokens, UNLIMITED, []) for row in rows])
    step = ScheduledBatch.of(table, plan)
    assert step.sampling == [place for place, row in enumerate(rows) if row.samples]
    assert step.roots.tolist() == [row.known[-1] for row in rows]
    assert step.lengths.tolist() == [row.num_computed + len(row.known) for row in rows]
    trees = [row.tree for row in rows]
    return build_batch(table, StepBatch(step, DraftTree.from_lists(trees), [len(tree.tokens) for tree in trees]))


@given(cases(), st.booleans())
def test_tokens_positions_and_kv_slots_of_each_request(rows: list[Case], collects_changes: bool) -> None:
    batch = flattened(rows, collects_changes)
    tokens, positions, kv_slots = [], [], []
    for row in rows:
        start, end = row.num_computed, row.num_computed + len(row.known)
        depths = [0]
        for parent in row.tree.parents[1:]:
            depths.append(depths[parent] + 1)
        tokens += row.known + row.tree.tokens[1:]
        positions += [*range(start, end), *(end - 1 + depth for depth in depths[1:])]
        kv_slots += row.kv_slots[start : end + len(row.tree.tokens) - 1]
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.attention.slot_mapping.tolist() == kv_slots


@given(cases())
def test_node_places_and_roots_index_the_batch(rows: list[Case]) -> None:
    batch = flattened(rows)
    places = batch.node_places
    at_nodes = (batch.token_ids if places is None else batch.token_ids[places]).tolist()
    assert at_nodes == [token for row in rows if row.samples for token in row.tree.tokens]
    assert batch.token_ids[batch.roots].tolist() == [row.known[-1] for row in rows]
    assert batch.read_lens == (None if places is None else [len(row.tree.tokens) for row in rows])


@given(cases())
def test_attention_metadata_describes_each_requests_past_and_tree(rows: list[Case]) -> None:
    attention = flattened(rows).attention
    for place, row in enumerate(rows):
        num_nodes = len(row.tree.tokens)
        queries = len(row.known) + num_nodes - 1
        assert attention.query_lens[place] == queries
        assert attention.kv_lens[place] == row.num_computed + queries
        kv_slots = attention.kv_slots[place, : attention.kv_lens[place]].tolist()
        assert kv_slots == row.kv_slots[: attention.kv_lens[place]]
        assert attention.tree_sizes[place] == ((num_nodes, num_nodes) if num_nodes > 1 else (0, 0))
