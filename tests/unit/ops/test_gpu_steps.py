"""The kernels of padded steps, in Triton's interpreter, give exactly what their twins in torch give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl

from specray.ops.gpu import steps, tree_kernels
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.torch_step_ops import TorchTable
from specray.spec_decode.verify_batch import VerifyOutput
from tests.support.step_cases import MAX_TOKENS, SLOTS, batches, both, compare_pending_trees, random_table
from tests.support.verify_cases import trees

PADDING_KV_SLOT = 999


@given(batches(), st.data())
@settings(max_examples=30)
def test_the_input_of_trees(batch: tuple[int, Tensor, DraftTree], data: st.DataObject) -> None:
    """One after the other, and padding behind them."""
    seed, slots, tree = batch
    rows, width = tree.tokens.shape
    total = data.draw(st.integers(int(tree.num_nodes.sum()), rows * width))

    def run() -> list[Tensor]:
        kept = torch.zeros(rows, 2 + width, dtype=torch.int64)
        ops = random_table(seed, 1).ops  # it chooses the kernels
        assert isinstance(ops, TorchTable)
        token_ids, positions, attention = ops.tree_input(slots, tree, PADDING_KV_SLOT, kept, total)
        paths = attention.paths.masked_fill(torch.arange(width + 1) >= attention.path_lengths[:, None], 0)
        lens = (attention.prefix_lens, attention.rows, attention.path_lengths, attention.slot_mapping)
        return [token_ids, positions, *lens, paths, kept]

    torch.testing.assert_close(*both(run), atol=0, rtol=0)


@given(st.integers(0, 99), st.integers(1, 9), st.data())
@settings(max_examples=20)
def test_the_input_of_a_draft_head(seed: int, width: int, data: st.DataObject) -> None:
    num_nodes = width + data.draw(st.integers(0, 3))
    slots = torch.tensor([*data.draw(st.permutations(range(SLOTS)))[:3], SLOTS])
    counts = torch.tensor([[data.draw(st.integers(0, width)), 7] for _ in range(3)] + [[0, 7]])[:, 0]
    nodes = torch.randint(0, num_nodes, (4, num_nodes + 2))[:, 1 : num_nodes + 1]

    def run() -> list[Any]:
        ops = random_table(seed, 12).ops
        assert isinstance(ops, TorchTable)
        found = ops.padded_extend(slots, counts, nodes, width, PADDING_KV_SLOT)
        attention = found.attention
        parts = (attention.prefix_lens, attention.rows, attention.path_lengths, attention.slot_mapping)
        own = (found.token_ids, found.positions, found.nodes, found.last, found.ends, found.roots)
        return [*own, *parts, attention.paths]

    torch.testing.assert_close(*both(run), atol=0, rtol=0)


@given(st.integers(0, 99), st.data())
@settings(max_examples=15)
def test_cells_of_the_table(seed: int, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([0, 1, 5, 300]))
    slots, positions = torch.randint(0, SLOTS, (count,)), torch.randint(0, MAX_TOKENS, (2, count)).T[:, 0]

    def run() -> tuple[Tensor, Tensor]:
        table = random_table(seed)  # it chooses the kernels
        return table.tokens_at(slots, positions), table.kv_slots_at(slots, positions)

    expected, found = both(run)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@given(batches())
@settings(max_examples=15)
def test_loading_a_step_makes_the_rest_padding(batch: tuple[int, Tensor, DraftTree]) -> None:
    _, slots, tree = batch
    count, width = tree.tokens.shape
    step = [torch.full((count + 2,), 77), torch.full((count + 2,), 77), *torch.full((2, count + 2, width + 3), 77)]
    steps.load(step, slots, tree.num_nodes, (tree.tokens, tree.parents), SLOTS)
    assert step[0].tolist() == [*slots.tolist(), SLOTS, SLOTS]
    assert step[1].tolist() == [*tree.num_nodes.tolist(), 0, 0]
    for part, expected in zip(step[2:], (tree.tokens, tree.parents), strict=True):
        assert torch.equal(part[:count, :width], expected)
        assert (part[count:] == NONE).all()
        assert (part[:, width:] == NONE).all()


def test_a_chain_whose_parents_are_one_row_is_loaded() -> None:
    tree = DraftTree.chains(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert tree.parents.stride(0) == 0
    step = [torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), *torch.zeros(2, 2, 4).long()]
    steps.load(step, torch.tensor([1, 0]), tree.num_nodes, (tree.tokens, tree.parents), SLOTS)
    assert step[3].tolist() == [[-1, 0, 1, -1]] * 2


@given(st.integers(0, 99), st.integers(1, 9), st.data())
@settings(max_examples=15)
def test_committed_tokens(seed: int, width: int, data: st.DataObject) -> None:
    ours, theirs = random_table(seed), random_table(seed)
    slots = torch.tensor([3, 0, SLOTS, SLOTS])
    counts = torch.tensor([data.draw(st.integers(0, width)), data.draw(st.integers(0, width)), 0, 0])
    tokens, nodes = torch.randint(0, 500, (2, 4, width))
    report = torch.zeros(4, 2 + 2 * width, dtype=torch.int64)
    outcome = VerifyOutput.of(counts, tokens, nodes).outcome
    steps.commit(ours.buffer, report, slots, outcome)
    theirs.ops.append(slots, outcome)
    assert torch.equal(ours.num_tokens, theirs.num_tokens)
    assert torch.equal(ours.token_ids[:-1], theirs.token_ids[:-1])
    assert torch.equal(report, torch.cat((counts[:, None], counts[:, None], tokens, nodes), 1))


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
@settings(max_examples=40)
def test_pending_trees(lists: list[TreeLists], data: st.DataObject) -> None:
    compare_pending_trees("triton", lists, data)


class Clock:
    """A GPU's clock, which `others` is called beside."""

    def __init__(self, others: Callable[[int], object] = lambda _: None) -> None:
        self._others, self._reads = others, 0

    def __call__(self) -> Any:
        self._reads += 1
        self._others(self._reads)
        return tl.full((), self._reads * 1_000_000, tl.int64)


def awaited(memory: Tensor, number: int, timeout_s: float) -> list[list[int]]:
    """Numbers of nodes of three trees of at most four nodes, and whether they came in time."""
    ops = step_ops(memory.device)
    found, in_time = ops.await_trees(memory[0, :1], memory[1:, 0], 4, number, timeout_s)
    return [found.tolist(), in_time.tolist()]


@pytest.mark.parametrize("number", [1, 16, 7, 2**40])
def test_waiting_for_trees_of_another_process(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Any]:
        memory = torch.tensor([[number - 1, 0], [2, 0], [5, 0], [NONE, 0]])
        before = awaited(memory, number, 0.003)
        step_ops(memory.device).release_trees(memory[0, :1], number)
        return [before, awaited(memory, number, 0.003), memory.tolist()]

    monkeypatch.setattr(tree_kernels, "globaltimer", Clock())
    expected, found = both(run)
    assert found == expected
    assert found[0] == [[NONE] * 3, [0]]
    assert found[1] == [[2, NONE, NONE], [1]]


def test_a_kernel_polls_until_trees_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.tensor([[0, 0], [1, 0], [2, 0], [3, 0]])

    def release(reads: int) -> None:
        if reads == 5:
            memory[0, 0] = 9

    clock = Clock(release)
    monkeypatch.setattr(tree_kernels, "globaltimer", clock)
    monkeypatch.setenv("SPECRAY_KERNELS", "triton")
    assert awaited(memory, 9, 60.0) == [[1, 2, 3], [1]]
    assert clock._reads < 10
