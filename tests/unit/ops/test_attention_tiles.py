"""Nodes of a request share tiles of Triton's attention: KV is read about once, and each node has its own bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specray.ops.attention import AttentionBatch, PaddedBatch, pack_paths
from specray.ops.gpu.attention import TritonAttend, TritonAttention
from specray.ops.layer_attention import LayerAttention
from tests.support.triton_loads import bytes_read

KV_HEADS, SLOTS, PREFIX = 2, 400, 58  # paths cross the ends of a block and of a chunk of the tests
CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]
TREE = [-1, 0, 0, 2, 1, 3, 5, 6, 7, 0, 9, 8]  # a tile may have several branches, or a part of one


class Nodes:
    """A tree of a request, with a query, a key and a value of each node."""

    def __init__(self, parents: list[int], group: int, dim: int, way: LayerAttention, prefix: int = PREFIX) -> None:
        torch.manual_seed(0)
        self.parents, self.heads, self.way, self.prefix = parents, KV_HEADS * group, way, prefix
        count = len(parents)
        self.q, self.kv = torch.randn(count, self.heads, dim), torch.randn(count, 2, KV_HEADS, dim)
        self.slots = 16 + torch.randperm(SLOTS - 17)[: prefix + count]  # the last one is for padding
        self.pool = torch.zeros(1, SLOTS, 2, KV_HEADS, dim)
        self.pool[0, self.slots[:prefix]] = torch.randn(prefix, 2, KV_HEADS, dim)
        self.sees = torch.eye(count, dtype=torch.bool)
        for node, parent in enumerate(parents[1:], 1):
            self.sees[node] |= self.sees[parent]

    def backend(self, splits: bool) -> TritonAttention:
        backend = TritonAttention(self.pool, self.heads, [self.way])
        backend.enough_programs = 10**6 if splits else 0
        return backend

    def alone(self, node: int) -> Tensor:
        """The node as a committed token after its ancestors."""
        path = self.sees[node].nonzero()[:, 0]
        end = self.prefix + len(path)
        slots = self.slots[:end]
        self.pool[0, slots[self.prefix :]] = self.kv[path]
        batch = AttentionBatch([1], [end], slots[None], slots[-1:], [(0, 0)])
        return self.backend(False).plan(batch)(0, self.q[node, None], self.kv[node, None])[0]

    def ragged(self, splits: bool) -> TritonAttend:
        count, written = len(self.parents), self.slots[self.prefix :]
        kinds = [(count, count)], self.sees[None], self.parents == list(range(-1, count - 1))
        return self.backend(splits).plan(AttentionBatch([count], [len(self.slots)], self.slots[None], written, *kinds))

    def padded(self, num_padding: int = 0) -> PaddedBatch:
        """Nodes of one row, with padding behind them."""
        count = len(self.parents)
        width, own = count + num_padding, self.slots[self.prefix :]
        sees = torch.eye(width, dtype=torch.bool)
        sees[:count, :count] = self.sees
        paths, lengths = pack_paths(sees[None], torch.cat((own, own.new_zeros(num_padding)))[None])
        prefixes, rows = torch.full((width,), self.prefix), torch.zeros(width, dtype=torch.int64)
        written = torch.cat((own, own.new_full((num_padding,), SLOTS - 1)))
        return PaddedBatch(prefixes, rows, self.slots[None], paths, lengths, written, row_width=width)

    def with_padding(self, count: int) -> tuple[Tensor, Tensor]:
        q = torch.cat((self.q, torch.randn(count, *self.q.shape[1:])))
        return q, torch.cat((self.kv, self.kv.new_full((count, *self.kv.shape[1:]), torch.nan)))


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.ops.gpu.attention.CHUNK", 32)
    monkeypatch.setattr("specray.ops.gpu.attention.KEYS", 16)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("parents", "group", "dim", "way"),
    [
        (CHAIN, 4, 16, LayerAttention()),
        (TREE, 4, 16, LayerAttention()),
        (CHAIN, 3, 20, LayerAttention(window=3)),
        (TREE, 1, 16, LayerAttention(window=20, sinks=torch.linspace(-1, 2, KV_HEADS))),
        (TREE, 8, 16, LayerAttention(window=40, scale=0.3, softcap=2.0)),
    ],
)
def test_nodes_of_a_tile_have_the_bits_of_committed_tokens(
    parents: list[int], group: int, dim: int, way: LayerAttention
) -> None:
    nodes = Nodes(parents, group, dim, way)
    expected = torch.stack([nodes.alone(node) for node in range(len(parents))])
    q, kv = nodes.with_padding(3)
    for splits in (False, True):
        assert torch.equal(nodes.ragged(splits)(0, nodes.q, nodes.kv), expected)
        padded = nodes.backend(not splits).plan_padded(nodes.padded(3))(0, q, kv)
        assert torch.equal(padded[: len(parents)], expected)
        assert padded.isfinite().all()


@pytest.mark.usefixtures("short_chunks")
def test_a_branch_that_is_not_finite_changes_no_other() -> None:
    nodes = Nodes([-1, 0, 0, 2], 4, 16, LayerAttention())
    expected = torch.stack([nodes.alone(node) for node in (0, 2, 3)])
    nodes.kv[1] = torch.nan
    assert torch.equal(nodes.ragged(False)(0, nodes.q, nodes.kv)[[0, 2, 3]], expected)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_changes_no_earlier_node_of_a_chain(number: float, is_rotated: bool) -> None:
    """They share tiles, in which the value counts 0 times for nodes that do not attend to it: 0 * NaN is NaN."""
    nodes = Nodes(CHAIN, 4, 16, LayerAttention())
    expected = torch.stack([nodes.alone(node) for node in range(3)])
    nodes.kv[3, 1, :, 5] = number
    for attend in (nodes.ragged(False), nodes.backend(False).plan_padded(nodes.padded())):
        if is_rotated:  # by nothing
            cos, sin = torch.ones(len(CHAIN), 1, 16), torch.zeros(len(CHAIN), 1, 16)
            found = attend.rotated(0, torch.cat((nodes.q, nodes.kv.flatten(1, 2)), 1), cos, sin, None, 1e-5)
        else:
            found = attend(0, nodes.q, nodes.kv)
        assert torch.equal(found[:3], expected)
        assert not found[3:].isfinite().any()


@pytest.mark.parametrize(("parents", "group", "most"), [(CHAIN, 4, 1.0), (CHAIN, 8, 2.0), (TREE, 4, 5.0)])
def test_nodes_of_a_request_read_its_kv_about_once(parents: list[int], group: int, most: float) -> None:
    """The blocks before a tree are read once a tile. Each of several branches reads the rest of the last one, too."""
    nodes = Nodes(parents, group, 16, LayerAttention(), prefix=200)
    once = nodes.pool[0, nodes.slots].nbytes
    batch, attend = nodes.padded(), nodes.ragged(False)
    assert bytes_read(nodes.pool, lambda: attend(0, nodes.q, nodes.kv)) <= most * once
    shared = nodes.backend(False).plan_padded(batch)
    assert bytes_read(nodes.pool, lambda: shared(0, nodes.q, None)) <= most * once
    single = nodes.backend(False).plan_padded(replace(batch, row_width=1))
    assert bytes_read(nodes.pool, lambda: single(0, nodes.q, None)) > 0.9 * len(parents) * once
