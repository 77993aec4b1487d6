"""Attention of padded batches against float64, and with the bits of the same trees in a ragged batch."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specray.ops.attention import AttentionBackend, AttentionBatch, PaddedAttention, PaddedBatch, pack_paths
from specray.ops.attention_torch import TorchAttention
from specray.ops.gpu.attention import TritonAttention
from specray.ops.layer_attention import LayerAttention

KV_HEADS, GROUP, DIM, WIDTH, SLOTS = 2, 3, 16, 80, 320
PREFIXES = [0, 5, 70]  # the last one is longer than two chunks of the tests; request 0 may be padding
TREES = [[-1, 0, 0, 2], [-1, 0, 1, 2], [-1, 0, 0, 0]]  # parents
NODES = len(TREES[0])


class Case(NamedTuple):
    pool: Tensor
    q: Tensor
    kv: Tensor
    sees: Tensor
    batch: PaddedBatch
    window: int | None

    def reference(self) -> Tensor:
        """float64 [T, heads, dim], one query at a time."""
        pool, batch, out = self.pool[0].double(), self.batch, []
        pool[batch.slot_mapping] = self.kv.double()
        for token, q in enumerate(self.q.double()):
            prefix = batch.kv_slots[batch.rows[token], : batch.prefix_lens[token]].long()
            keys = torch.cat((prefix, batch.paths[token, : batch.path_lengths[token]]))
            keys = keys[-self.window :] if self.window else keys
            k, v = pool[keys].repeat_interleave(GROUP, 2).unbind(1)
            weights = (torch.einsum("hd,khd->hk", q, k) * DIM**-0.5).softmax(-1)
            out.append(torch.einsum("hk,khd->hd", weights, v))
        return torch.stack(out).flatten(1)


def make_case(window: int | None = None, has_padding: bool = True) -> Case:
    torch.manual_seed(0)
    requests = len(TREES)
    slots = 16 + torch.randperm(SLOTS - 32)[: requests * WIDTH].view(requests, WIDTH)
    prefix_lens = torch.tensor(PREFIXES)
    own = slots.gather(1, prefix_lens[:, None] + torch.arange(NODES))
    written = own.clone()
    if has_padding:
        own[0], written[0] = 0, SLOTS - 1
    sees = torch.zeros(requests, NODES, NODES, dtype=torch.bool)
    for row, parents in enumerate(TREES):
        for node, parent in enumerate(parents):
            sees[row, node] = sees[row, parent] if parent >= 0 else False
            sees[row, node, node] = True
    pool = torch.randn(1, SLOTS, 2, KV_HEADS, DIM)
    pool[:, :16] = 0.0
    table = torch.zeros(requests + 2, 2 * WIDTH, dtype=torch.int32)[:, WIDTH:]  # a view of a wider table
    order = torch.tensor([3, 0, 4])
    table[order] = slots.int()
    q, kv = torch.randn(requests * NODES, KV_HEADS * GROUP, DIM), torch.randn(requests * NODES, 2, KV_HEADS, DIM)
    if has_padding:
        kv[:NODES] = torch.nan  # what padding computes may be anything
    lens, rows = prefix_lens.repeat_interleave(NODES), order.repeat_interleave(NODES)
    batch = PaddedBatch(lens, rows, table, *pack_paths(sees, own), written.flatten())
    return Case(pool, q, kv, sees, batch, window)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.ops.gpu.attention.CHUNK", 32)
    monkeypatch.setattr("specray.ops.gpu.attention.KEYS", 16)


def test_a_path_is_the_seen_keys_in_order() -> None:
    sees = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    paths, lengths = pack_paths(sees, torch.tensor([[7, 8, 9]]))
    assert [path[:length] for path, length in zip(paths.tolist(), lengths.tolist(), strict=True)] == [
        [7],
        [7, 8],
        [7, 9],
    ]


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("kind", ["torch", "triton", "triton, shared by 2 programs", "triton, by one"])
def test_padded_batches_attend_to_prefixes_and_paths(kind: str, window: int | None) -> None:
    case = make_case(window)
    layers = [LayerAttention(window=window)]
    kernels: type[TorchAttention | TritonAttention] = TorchAttention if kind == "torch" else TritonAttention
    backend: AttentionBackend = kernels(case.pool, KV_HEADS * GROUP, layers)
    if isinstance(backend, TritonAttention):
        backend.enough_programs = {"triton": 10**6, "triton, by one": 0}.get(kind, 40)
    expected = case.reference()
    assert isinstance(backend, PaddedAttention)
    seen = backend.plan_padded(case.batch)(0, case.q, case.kv)
    torch.testing.assert_close(seen[NODES:].double(), expected[NODES:], atol=1e-5, rtol=1e-4)
    assert seen[:NODES].isfinite().all()  # padding reads zeros, not what it has written
    assert not case.pool[0, :16].any()


@pytest.mark.parametrize("enough_programs", [0, 40, 10**6])
def test_a_padded_batch_has_the_bits_of_a_ragged_one(enough_programs: int) -> None:
    case = make_case(has_padding=False)
    batch, backend = case.batch, TritonAttention(case.pool, KV_HEADS * GROUP)
    backend.enough_programs = enough_programs
    padded = backend.plan_padded(batch)(0, case.q, case.kv)
    kv_lens = [prefix + NODES for prefix in PREFIXES]
    kv_slots = batch.kv_slots[batch.rows[::NODES]].long()
    ragged = AttentionBatch([NODES] * 3, kv_lens, kv_slots, batch.slot_mapping, [(NODES, NODES)] * 3, case.sees)
    assert torch.equal(backend.plan(ragged)(0, case.q, case.kv), padded)


@pytest.mark.parametrize("enough_programs", [0, 40, 10**6])
@pytest.mark.parametrize("lens", [[4, 1, 3], [1, 1, 1], [0, 4, 2], [4, 4, 0]])
@pytest.mark.parametrize("num_padding", [0, 1, 5])
def test_rows_of_any_length_have_the_bits_of_equal_ones(
    lens: list[int], num_padding: int, enough_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, sizes = torch.empty, list[torch.Size]()

    def nans(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        sizes.append(made.shape)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nans)
    case = make_case(has_padding=False)
    backend = TritonAttention(case.pool.clone(), KV_HEADS * GROUP)
    backend.enough_programs = enough_programs
    expected = backend.plan_padded(replace(case.batch, row_width=NODES))(0, case.q, case.kv)
    nodes = torch.tensor([row * NODES + node for row, length in enumerate(lens) for node in range(length)])

    def ragged(part: Tensor, padding: float) -> Tensor:
        return torch.cat((part[nodes], torch.full((num_padding, *part.shape[1:]), padding, dtype=part.dtype)))

    batch = case.batch
    parts = [ragged(batch.prefix_lens, 0), ragged(batch.rows, 0), batch.kv_slots, ragged(batch.paths, 0)]
    written = ragged(batch.slot_mapping, SLOTS - 1)
    made = PaddedBatch(*parts, ragged(batch.path_lengths, 1), written, NODES, torch.tensor(lens))
    backend = TritonAttention(case.pool.clone(), KV_HEADS * GROUP)
    backend.enough_programs = enough_programs
    sizes.clear()
    found = backend.plan_padded(made)(0, ragged(case.q, 1.0), ragged(case.kv, torch.nan))
    partials = {size[1] for size in sizes if len(size) == 4}
    assert partials == ({len(nodes) + num_padding} if enough_programs else set()), "partial sums of each query, once"
    assert torch.equal(found[: len(nodes)], expected[nodes])
    assert found.isfinite().all()
