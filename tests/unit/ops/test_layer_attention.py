"""Layers that attend in ways of their own: windows, sinks, capped scores, other scales and other sizes of heads."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specray.ops.attention import PaddedAttention, PaddedBatch, pack_paths
from specray.ops.backends import make_backend
from specray.ops.layer_attention import LayerAttention, complete_layers, layer_pools, pack_kv
from tests.unit.ops.test_attention import NUM_SLOTS, RequestShape, ancestors, batches, make_rows, slots_of, visible

KV_HEADS, HEADS, DIM = 2, 6, 8
SINKS = torch.tensor([0.3, -2.0, 4.0, 0.0, 1.0, -0.5])
LAYERS = (
    LayerAttention(),
    LayerAttention(window=1),
    LayerAttention(window=7),
    LayerAttention(window=70),
    LayerAttention(scale=0.9),
    LayerAttention(softcap=1.5),
    LayerAttention(sinks=SINKS),
    LayerAttention(window=20, scale=0.2, softcap=3.0, sinks=SINKS.flip(0)),
    LayerAttention(num_heads=4, num_kv_heads=1, head_dim=16, window=9, sinks=SINKS[:4]),
    LayerAttention(num_heads=3, num_kv_heads=3, head_dim=4),
)
FEW_LAYERS = (LAYERS[2], *LAYERS[7:9])  # every way at least once, for Triton's interpreter, which is slow
# auto: the compiled kernels, where there are any; triton: in its interpreter
backends = pytest.mark.parametrize("backend", ["torch", "auto", "triton"])


def naive(
    layer: LayerAttention, shapes: list[RequestShape], slots: Sequence[np.ndarray], pool: Tensor, q: Tensor
) -> Tensor:
    """Dense attention in float64: all scores of a request, then what is masked. `pool` is the layer's."""
    out, begin, fold = [], 0, layer.num_heads // layer.num_kv_heads
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    for shape, of_request in zip(shapes, slots, strict=True):
        count = len(of_request) - shape.num_past
        k, v = pool[torch.from_numpy(of_request)].double().repeat_interleave(fold, 2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + count].double(), k) * scale
        if layer.softcap is not None:
            scores = (scores / layer.softcap).tanh() * layer.softcap
        scores = scores.masked_fill(~torch.from_numpy(visible(shape, layer.window)), -torch.inf)
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if layer.sinks is not None:
            total = total + layer.sinks.double().exp()[:, None, None]
        out.append(torch.einsum("hqk,khd->qhd", weights / total, v))
        begin += count
    return torch.cat(out).flatten(1)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@given(batches, st.booleans())
@settings(max_examples=30)
def test_each_layer_attends_in_its_own_way(backend: str, shapes: list[RequestShape], scattered: bool) -> None:
    check_batch(backend, shapes, scattered)


@given(batches, st.booleans())
@settings(max_examples=3)
def test_each_layer_attends_in_its_own_way_in_tritons_interpreter(shapes: list[RequestShape], scattered: bool) -> None:
    check_batch("triton", shapes, scattered, FEW_LAYERS)


def check_batch(
    backend: str, shapes: list[RequestShape], scattered: bool, layers: Sequence[LayerAttention] = LAYERS
) -> None:
    torch.manual_seed(0)
    pool = torch.randn(len(layers), NUM_SLOTS, 2, KV_HEADS, DIM)
    pool[:, :16] = 0
    rows, complete = make_rows(shapes, scattered), complete_layers(pool, HEADS, layers)
    attend = make_backend(backend, pool, HEADS, layers=layers).plan(rows)
    for index, layer in enumerate(complete):
        q = torch.randn(sum(rows.query_lens), layer.num_heads, layer.head_dim)
        kv = torch.randn(len(q), 2, layer.num_kv_heads, layer.head_dim)
        result = attend(index, q, kv)
        own = layer_pools(pool, complete)[index]
        assert torch.equal(own[rows.slot_mapping], kv)
        expected = naive(layer, shapes, slots_of(rows), own, q)
        torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


@backends
@pytest.mark.parametrize("shapes", [[RequestShape(3, 2, [-1]), RequestShape(9, 1, [-1, 0, 0])]])
def test_queries_without_kv_read_what_others_wrote(backend: str, shapes: list[RequestShape]) -> None:
    torch.manual_seed(0)
    pool = torch.randn(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    rows = make_rows(shapes, True)
    attend = make_backend(backend, pool, HEADS, layers=LAYERS[2:3]).plan(rows)
    q, kv = torch.randn(len(rows.slot_mapping), HEADS, DIM), torch.randn(len(rows.slot_mapping), 2, KV_HEADS, DIM)
    first = attend(0, q, kv)
    written = pool.clone()
    assert torch.equal(attend(0, q, None), first)
    assert torch.equal(pool, written)
    assert not torch.equal(attend(0, q, kv + 1.0), first)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nodes_of_a_padded_batch_attend_as_those_of_a_ragged_one(backend: str) -> None:
    torch.manual_seed(0)
    layers, parents = FEW_LAYERS, [-1, 0, 0, 2, 1, 3]
    num_past, nodes = [0, 5, 70], len(parents)
    shapes = [RequestShape(past, 1, parents) for past in num_past]
    rows = make_rows(shapes, scattered=True)
    pool = torch.randn(len(layers), NUM_SLOTS, 2, KV_HEADS, DIM)
    pool[:, :16] = 0
    own = torch.stack([rows.kv_slots[row, past : past + nodes] for row, past in enumerate(num_past)])
    request = torch.arange(len(shapes)).repeat_interleave(nodes)
    paths = pack_paths(torch.from_numpy(ancestors(parents)).expand(len(shapes), -1, -1), own)
    padded = PaddedBatch(torch.tensor(num_past)[request], request, rows.kv_slots, *paths, rows.slot_mapping)
    made = make_backend(backend, pool, HEADS, layers=layers)
    assert isinstance(made, PaddedAttention)
    attend, as_ragged = made.plan_padded(padded), made.plan(rows)
    for index, layer in enumerate(complete_layers(pool, HEADS, layers)):
        q = torch.randn(len(request), layer.num_heads, layer.head_dim)
        kv = torch.randn(len(q), 2, layer.num_kv_heads, layer.head_dim)
        torch.testing.assert_close(attend(index, q, kv), as_ragged(index, q, kv), atol=1e-5, rtol=1e-4)


@backends
def test_values_may_be_narrower_than_keys(backend: str) -> None:
    """Padded with zeros, they give the result of their own size, and zeros behind it."""
    torch.manual_seed(0)
    shapes, narrow = [RequestShape(0, 9, [-1]), RequestShape(0, 1, [-1])], 5
    rows, pool = make_rows(shapes, scattered=True), torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    q, k, v = (torch.randn(10, heads, dim) for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, narrow)))
    result = make_backend(backend, pool, HEADS).plan(rows)(0, q, pack_kv(k, v, DIM)).view(10, HEADS, DIM)
    assert not result[..., narrow:].any()
    q, k, v = (part[:9].transpose(0, 1) for part in (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(result[:9, :, :narrow], dense.transpose(0, 1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([LayerAttention()] * 2, "attention of 2 layers does not fit a KV pool of 1"),
        ([LayerAttention(num_kv_heads=4)], "6 query heads cannot share 4 KV heads"),
        ([LayerAttention(sinks=SINKS[:4])], r"sinks of shape \(4,\) are not one for each of 6 heads"),
        ([LayerAttention(num_kv_heads=3)], r"keys and values of shape \(2, 3, 8\) do not fit a KV slot of shape"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: list[LayerAttention], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_backend("torch", torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, DIM), HEADS, layers=layers)
