"""Attention over ragged rows, paged KV and trees, compared with a loop over queries and heads, with all kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specray.errors import ConfigError
from specray.ops.attention import AttentionBatch, as_bytes, make_pool, move_kv, write_kv
from specray.ops.attention_torch import _BATCH_BYTES, _SHORT, _grouped
from specray.ops.backends import check_kv_dtype, make_backend
from specray.ops.cpu.library import kernels
from specray.ops.layer_attention import LayerAttention
from tests.support.examples import at_most

NUM_SLOTS = 464  # 29 pages: at most 432 slots of a batch, and the first page, which stays free
DIM, LAYERS = 8, 2
KV_HEADS, FOLD = 2, 3
# auto: the compiled kernels, where there are any; triton: in its interpreter
compiled = pytest.mark.parametrize("backend", ["torch", "auto"])
backends = pytest.mark.parametrize("backend", ["torch", "auto", "triton"])
GROUPINGS = [(KV_HEADS, FOLD), (3, 1), (1, 4)]  # (KV heads, query heads per KV head)


class RequestShape(NamedTuple):
    """Lengths of a row's past KV and known queries, and the parents of its tree. The root is the last known query."""

    num_past: int
    num_known: int
    parents: list[int]


@st.composite
def row_shapes(draw: st.DrawFn, longest: int) -> RequestShape:
    parents = [-1] + [draw(st.integers(0, node)) for node in range(draw(st.integers(0, 8)))]
    return RequestShape(draw(st.integers(0, 40)), draw(st.integers(1, longest)), parents)


batches = (
    st.tuples(st.lists(row_shapes(longest=4), max_size=3), st.lists(row_shapes(longest=90), max_size=2))
    .map(lambda both: both[0] + both[1])
    .filter(bool)
)


def visible(shape: RequestShape, window: int | None) -> np.ndarray:
    """bool [queries, keys]: which keys of its row a query attends to."""
    first_draft = shape.num_past + shape.num_known  # its key
    num_keys = first_draft + len(shape.parents) - 1
    sees = np.zeros((num_keys - shape.num_past, num_keys), dtype=bool)
    for query, keys in enumerate(sees):
        query_as_key = shape.num_past + query
        size = window or query_as_key + 1
        node, depth = query_as_key - first_draft + 1, 0  # node 0 is the root
        while node > 0:
            keys[first_draft + node - 1] = depth < size
            node, depth = shape.parents[node], depth + 1
        position = min(query_as_key, first_draft - 1) + depth
        keys[max(position - size + 1, 0) : min(position + 1, first_draft)] = True
    return sees


def ancestors(parents: list[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def make_rows(shapes: list[RequestShape], scattered: bool) -> AttentionBatch:
    """Rows with contiguous or scattered KV slots. Slots 0 to 15 stay free."""
    order = np.random.default_rng(1).permutation(np.arange(16, NUM_SLOTS)) if scattered else np.arange(16, NUM_SLOTS)
    kv_slots, query_lens, start = [], [], 0
    for shape in shapes:
        queries = shape.num_known + len(shape.parents) - 1
        kv_slots.append(order[start : start + shape.num_past + queries])
        query_lens.append(queries)
        start += len(kv_slots[-1])
    trees = [ancestors(shape.parents) if len(shape.parents) > 1 else None for shape in shapes]
    return make_batch(query_lens, kv_slots, trees)


def make_batch(
    query_lens: list[int], kv_slots: Sequence[np.ndarray], trees: Sequence[np.ndarray | None]
) -> AttentionBatch:
    """A batch that writes the last `query_lens` KV slots of each row. Padding of slots and masks is arbitrary."""
    kv_lens = [len(slots) for slots in kv_slots]
    padded = np.full((len(kv_slots), max(kv_lens) + 2), NUM_SLOTS - 1)
    for row, slots in zip(padded, kv_slots, strict=True):
        row[: len(slots)] = slots
    written = [slots[-count:] for slots, count in zip(kv_slots, query_lens, strict=True)]
    sizes = [(0, 0) if tree is None else (len(tree), tree.shape[1]) for tree in trees]
    mask = np.ones((len(trees), *(max(1, *column) for column in zip((1, 1), *sizes, strict=True))), dtype=bool)
    for row, tree in zip(mask, trees, strict=True):
        if tree is not None:
            row[: len(tree), : tree.shape[1]] = tree
    return AttentionBatch(
        query_lens,
        kv_lens,
        torch.from_numpy(padded),
        torch.from_numpy(np.concatenate(written)),
        sizes,
        torch.from_numpy(mask) if any(tree is not None for tree in trees) else None,
    )


def slots_of(batch: AttentionBatch) -> list[np.ndarray]:
    """KV slots of each row, without padding."""
    return [slots[:length].numpy() for slots, length in zip(batch.kv_slots, batch.kv_lens, strict=True)]


windows = st.none() | st.integers(1, 50)


def in_window(window: int | None, pool: Tensor) -> list[LayerAttention]:
    """How the layers of `pool` attend if all have this window."""
    return [LayerAttention(window=window)] * len(pool)


def naive(
    shapes: list[RequestShape], rows: AttentionBatch, layer_pool: Tensor, q: Tensor, window: int | None = None
) -> Tensor:
    """Attention in float64, one query at a time."""
    out, at, fold = torch.zeros(q.shape, dtype=torch.float64), 0, q.shape[1] // layer_pool.shape[2]
    for shape, slots, length in zip(shapes, slots_of(rows), rows.query_lens, strict=True):
        for query, sees in enumerate(visible(shape, window)):
            k, v = layer_pool[slots[sees]].double().repeat_interleave(fold, 2).unbind(1)
            scores = torch.einsum("khd,hd->hk", k, q[at + query].double()) / q.shape[2] ** 0.5
            out[at + query] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
        at += length
    return out.flatten(1)


any_batch = given(batches, st.booleans(), st.integers(0, 1), st.sampled_from(GROUPINGS), windows)


@compiled
@any_batch
@at_most(60)
def test_every_query_attends_to_its_past_and_its_ancestors_in_the_window(
    backend: str, shapes: list[RequestShape], scattered: bool, layer: int, grouping: tuple[int, int], window: int | None
) -> None:
    check_batch(backend, shapes, scattered, layer, grouping, window)


@any_batch
@at_most(12)
def test_every_query_attends_as_it_should_in_tritons_interpreter(
    shapes: list[RequestShape], scattered: bool, layer: int, grouping: tuple[int, int], window: int | None
) -> None:
    check_batch("triton", shapes, scattered, layer, grouping, window)


def check_batch(
    backend: str,
    shapes: list[RequestShape],
    scattered: bool,
    layer: int,
    grouping: tuple[int, int],
    window: int | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    torch.manual_seed(0)
    kv_heads, num_heads = grouping[0], grouping[0] * grouping[1]
    pool = torch.randn(LAYERS, NUM_SLOTS, 2, kv_heads, DIM)
    pool[:, :16] = 0
    pool = pool.to(dtype)
    rows = make_rows(shapes, scattered)
    q, kv = torch.randn(sum(rows.query_lens), num_heads, DIM), torch.randn(sum(rows.query_lens), 2, kv_heads, DIM)
    before = pool.clone()
    result = make_backend(backend, pool, num_heads, layers=in_window(window, pool)).plan(rows)(layer, q, kv)
    as_bytes(before)[layer, rows.slot_mapping] = as_bytes(kv.to(dtype))
    assert torch.equal(as_bytes(pool), as_bytes(before))  # only the new KV is written
    expected = naive(shapes, rows, pool[layer].float(), q, window)
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


@backends
def test_kv_of_other_rows_is_not_read(backend: str) -> None:
    """NaN in slots of other rows and of padding does not change the result."""
    shapes = [RequestShape(3, 1, [-1, 0, 0]), RequestShape(30, 2, [-1]), RequestShape(0, 80, [-1])]
    rows = make_rows(shapes, scattered=True)
    torch.manual_seed(0)
    clean = torch.randn(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    clean[:, :16] = 0
    dirty, own = clean.clone(), np.concatenate([np.arange(16), *slots_of(rows)])
    dirty[:, np.setdiff1d(np.arange(NUM_SLOTS), own)] = torch.nan
    q, kv = torch.randn(sum(rows.query_lens), KV_HEADS * FOLD, DIM), torch.randn(sum(rows.query_lens), 2, KV_HEADS, DIM)
    outs = [make_backend(backend, pool, KV_HEADS * FOLD).plan(rows)(0, q, kv) for pool in (clean, dirty)]
    assert torch.equal(*outs)


@backends
def test_nan_in_a_row_does_not_change_others(backend: str) -> None:
    shapes = [RequestShape(3, 1, [-1, 0]), RequestShape(5, 1, [-1]), RequestShape(9, 1, [-1, 0, 1])]
    rows = make_rows(shapes, scattered=False)
    torch.manual_seed(0)
    q, kv = torch.randn(sum(rows.query_lens), KV_HEADS * FOLD, DIM), torch.randn(sum(rows.query_lens), 2, KV_HEADS, DIM)
    outs = []
    for has_nan in (False, True):
        pool = torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, DIM)
        q_in, kv_in = q.clone(), kv.clone()
        if has_nan:
            q_in[2] = kv_in[2] = torch.nan
        outs.append(make_backend(backend, pool, KV_HEADS * FOLD).plan(rows)(0, q_in, kv_in))
    assert outs[1][2].isnan().all()
    assert torch.equal(outs[0][[0, 1, 3, 4, 5]], outs[1][[0, 1, 3, 4, 5]])


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, DIM), (torch.bfloat16, DIM), (torch.bfloat16, 64)])
def test_nan_in_a_token_does_not_change_those_before_it(dtype: torch.dtype, dim: int) -> None:
    """The kernels multiply bfloat16 keys in pairs: the last of an odd number of keys has no partner."""
    rows = make_rows([RequestShape(0, 6, [-1])], scattered=False)
    torch.manual_seed(0)
    q, kv = torch.randn(6, KV_HEADS * FOLD, dim).to(dtype), torch.randn(6, 2, KV_HEADS, dim).to(dtype)
    outs = []
    for value in (1.0, torch.nan):
        pool = torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, dim, dtype=dtype)
        new = kv.clone()
        new[5] = value
        outs.append(make_backend("auto", pool, KV_HEADS * FOLD).plan(rows)(0, q, new))
    assert outs[1][5].isnan().all()
    assert torch.equal(outs[0][:5], outs[1][:5])


@backends
def test_one_plan_is_used_for_every_layer(backend: str) -> None:
    shapes = [RequestShape(5, 1, [-1, 0, 0]), RequestShape(0, 70, [-1])]
    rows = make_rows(shapes, scattered=True)
    torch.manual_seed(0)
    pool = torch.randn(LAYERS, NUM_SLOTS, 2, KV_HEADS, DIM)
    attend = make_backend(backend, pool, KV_HEADS * FOLD).plan(rows)
    for layer in (1, 0, 1):
        q = torch.randn(sum(rows.query_lens), KV_HEADS * FOLD, DIM)
        result = attend(layer, q, torch.randn(len(q), 2, KV_HEADS, DIM))
        torch.testing.assert_close(result.double(), naive(shapes, rows, pool[layer], q), atol=2e-5, rtol=1e-4)


@backends
@pytest.mark.parametrize("num_queries", [63, 64, 65, 66])
def test_rows_around_the_length_limit_of_a_padded_batch(num_queries: int, backend: str) -> None:
    shapes = [
        RequestShape(9, 1, [-1]),
        RequestShape(4, num_queries, [-1]),
        RequestShape(2, num_queries - 2, [-1, 0, 0]),
    ]
    rows = make_rows(shapes, scattered=False)
    torch.manual_seed(0)
    pool = torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    q, kv = torch.randn(sum(rows.query_lens), KV_HEADS * FOLD, DIM), torch.randn(sum(rows.query_lens), 2, KV_HEADS, DIM)
    result = make_backend(backend, pool, KV_HEADS * FOLD).plan(rows)(0, q, kv)
    torch.testing.assert_close(result.double(), naive(shapes, rows, pool[0], q), atol=2e-5, rtol=1e-4)


@backends
def test_keys_are_read_in_the_order_of_the_row(backend: str) -> None:
    """First and last slot are those of a contiguous range, but slots between them are swapped."""
    shape = RequestShape(0, 6, [-1])
    slots = np.array([20, 23, 22, 21, 24, 25])
    rows = make_batch([6], [slots], [None])
    torch.manual_seed(0)
    pool = torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    q, kv = torch.randn(6, KV_HEADS * FOLD, DIM), torch.randn(6, 2, KV_HEADS, DIM)
    result = make_backend(backend, pool, KV_HEADS * FOLD).plan(rows)(0, q, kv)
    torch.testing.assert_close(result.double(), naive([shape], rows, pool[0], q), atol=2e-5, rtol=1e-4)


# ---- levels of a drafter's tree: n new nodes, each with its ancestors among the last m keys --------------------------


class Level(NamedTuple):
    """A row of n new nodes. The keys are `num_past` keys visible to all, m - n earlier nodes, and the n new nodes."""

    num_past: int
    tree: np.ndarray  # bool [n, m]


@st.composite
def levels(draw: st.DrawFn) -> Level:
    nodes, earlier = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    bits = draw(st.lists(st.booleans(), min_size=nodes * earlier, max_size=nodes * earlier))
    before = np.array(bits, dtype=bool).reshape(nodes, earlier)
    return Level(draw(st.integers(0, 50)), np.concatenate((before, np.eye(nodes, dtype=bool)), 1))


@compiled
@given(st.lists(levels(), min_size=1, max_size=5), st.booleans(), st.sampled_from([_BATCH_BYTES, 20_000, 1]), windows)
@at_most(60)
def test_nodes_of_a_level_attend_to_the_past_and_their_ancestors_in_the_window(
    backend: str, rows: list[Level], scattered: bool, batch_bytes: int, window: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specray.ops.attention_torch._BATCH_BYTES", batch_bytes)
        check_levels(backend, rows, scattered, window)


@given(st.lists(levels(), min_size=1, max_size=3), st.booleans(), windows)
@at_most(15)
def test_nodes_of_a_level_attend_as_they_should_in_tritons_interpreter(
    rows: list[Level], scattered: bool, window: int | None
) -> None:
    check_levels("triton", rows, scattered, window)


def check_levels(backend: str, rows: list[Level], scattered: bool, window: int | None) -> None:
    order = np.arange(16, NUM_SLOTS)
    if scattered:
        np.random.default_rng(2).shuffle(order)
    lengths = [row.num_past + row.tree.shape[1] for row in rows]
    ends = np.cumsum(lengths)
    kv_slots = [order[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    query_lens = [len(row.tree) for row in rows]
    ragged = make_batch(query_lens, kv_slots, [row.tree for row in rows])
    torch.manual_seed(0)
    pool = torch.randn(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    pool[:, :16] = 0
    q, kv = torch.randn(sum(query_lens), KV_HEADS * FOLD, DIM), torch.randn(sum(query_lens), 2, KV_HEADS, DIM)
    made = make_backend(backend, pool, KV_HEADS * FOLD, layers=in_window(window, pool))
    result = made.plan(ragged)(0, q, kv)
    torch.testing.assert_close(result.double(), naive_levels(rows, kv_slots, pool[0], q, window), atol=2e-5, rtol=1e-4)


def naive_levels(
    rows: list[Level], kv_slots: list[np.ndarray], layer_pool: Tensor, q: Tensor, window: int | None
) -> Tensor:
    out, queries = [], iter(q.double())
    for row, slots in zip(rows, kv_slots, strict=True):
        for mask in row.tree:
            # Past and ancestors are consecutive positions, of which the node has the last.
            keys = [*slots[: row.num_past], *(slots[row.num_past + j] for j in np.flatnonzero(mask))]
            keys = keys[-(window or len(keys)) :]
            query = next(queries)
            for head in range(len(query)):
                k, v = layer_pool[keys, :, head // FOLD].double().unbind(1)
                out.append((k @ query[head] / DIM**0.5).softmax(0) @ v)
    return torch.cat(out).view(len(q), -1)


# ---- grouping of rows into padded batches ---------------------------------------------------------------------------

lengths = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 400)), min_size=1, max_size=12)


@given(lengths, st.integers(1, 3000))
def test_groups_have_each_row_once_and_long_rows_alone(rows: list[tuple[int, int]], max_keys: int) -> None:
    query_lens, key_lens = [queries for queries, _ in rows], [queries + past for queries, past in rows]
    groups = _grouped(query_lens, key_lens, max_keys)
    assert sorted(r for group in groups for r in group) == list(range(len(rows)))
    for group in groups:
        assert len(group) == 1 or max(query_lens[r] for r in group) <= _SHORT
        assert len(group) == 1 or len(group) * max(key_lens[r] for r in group) <= max_keys


def test_rows_of_similar_lengths_share_a_batch() -> None:
    """This bounds the padding of short rows."""
    assert _grouped([1] * 6, [10, 90, 11, 80, 12, 85], most_keys=100) == [[1], [5], [3], [4, 2, 0]]
    assert _grouped([1] * 6, [10, 90, 11, 80, 12, 85], most_keys=540) == [[0, 1, 2, 3, 4, 5]]


@given(batches, st.booleans(), st.integers(1, 30_000))
@at_most(40)
def test_results_do_not_depend_on_the_grouping(shapes: list[RequestShape], scattered: bool, batch_bytes: int) -> None:
    torch.manual_seed(0)
    pool = torch.randn(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    pool[:, :16] = 0
    rows = make_rows(shapes, scattered)
    q, kv = torch.randn(sum(rows.query_lens), KV_HEADS * FOLD, DIM), torch.randn(sum(rows.query_lens), 2, KV_HEADS, DIM)
    whole = make_backend("torch", pool.clone(), KV_HEADS * FOLD).plan(rows)(0, q, kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specray.ops.attention_torch._BATCH_BYTES", batch_bytes)
        parts = make_backend("torch", pool.clone(), KV_HEADS * FOLD).plan(rows)(0, q, kv)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.double(), naive(shapes, rows, after(pool, rows, kv)[0], q), atol=2e-5, rtol=1e-4)


def after(pool: Tensor, rows: AttentionBatch, kv: Tensor) -> Tensor:
    pool[0, rows.slot_mapping] = kv
    return pool


@backends
@pytest.mark.parametrize("dim", [DIM, 32, 64, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float64(dtype: torch.dtype, dim: int, backend: str) -> None:
    shapes = [RequestShape(20, 1, [-1, 0, 0, 1]), RequestShape(7, 3, [-1]), RequestShape(90, 1, [-1, 0])]
    rows = make_rows(shapes, scattered=True)
    torch.manual_seed(0)
    pool = torch.randn(1, NUM_SLOTS, 2, KV_HEADS, dim).to(dtype)
    q, kv = torch.randn(sum(rows.query_lens), KV_HEADS * FOLD, dim), torch.randn(sum(rows.query_lens), 2, KV_HEADS, dim)
    result = make_backend(backend, pool, KV_HEADS * FOLD).plan(rows)(0, q.to(dtype), kv.to(dtype))
    torch.testing.assert_close(result.double(), naive(shapes, rows, pool[0], q.to(dtype)), atol=0.05, rtol=0.05)


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
@given(batches, st.booleans(), st.sampled_from([*GROUPINGS, (1, 20)]), st.sampled_from([32, 64]), windows)
@at_most(40)
def test_the_kernels_for_bfloat16_are_close_to_float64_with_any_trees_and_windows(
    shapes: list[RequestShape], scattered: bool, grouping: tuple[int, int], dim: int, window: int | None
) -> None:
    """With AMX, query heads are computed 16 at a time: a part of one query's, or those of several."""
    rows = make_rows(shapes, scattered)
    torch.manual_seed(0)
    kv_heads, num_heads = grouping[0], grouping[0] * grouping[1]
    pool = torch.randn(1, NUM_SLOTS, 2, kv_heads, dim).bfloat16()
    q, kv = torch.randn(sum(rows.query_lens), num_heads, dim), torch.randn(sum(rows.query_lens), 2, kv_heads, dim)
    made = make_backend("auto", pool, num_heads, layers=in_window(window, pool))
    result = made.plan(rows)(0, q.bfloat16(), kv.bfloat16())
    expected = naive(shapes, rows, pool[0], q.bfloat16(), window)
    torch.testing.assert_close(result.double(), expected, atol=0.05, rtol=0.05)


def in_bytes(kv: Tensor) -> Tensor:
    """Rows of a pool in int8: [..., dim + 4], each rounded to 127 steps on each side of zero, with its scale behind."""
    kv = kv.float()
    scales = kv.abs().amax(-1, keepdim=True) / 127
    steps = (kv * (1 / scales.clamp(min=1e-38))).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((steps, scales.contiguous().view(torch.int8)), -1)


def from_bytes(pool: Tensor) -> Tensor:
    """What the rows of a pool in int8 stand for, float32 [..., dim]."""
    return pool[..., :-4].float() * pool[..., -4:].contiguous().view(torch.float32)


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
@any_batch
@at_most(40)
def test_a_pool_in_int8_is_read_and_written_row_by_row(
    shapes: list[RequestShape], scattered: bool, layer: int, grouping: tuple[int, int], window: int | None
) -> None:
    torch.manual_seed(0)
    kv_heads, num_heads = grouping[0], grouping[0] * grouping[1]
    pool = make_pool(LAYERS, NUM_SLOTS, kv_heads, DIM, torch.int8, torch.device("cpu"))
    pool[:, 16:] = in_bytes(torch.randn(LAYERS, NUM_SLOTS - 16, 2, kv_heads, DIM))
    rows = make_rows(shapes, scattered)
    q, kv = torch.randn(sum(rows.query_lens), num_heads, DIM), torch.randn(sum(rows.query_lens), 2, kv_heads, DIM)
    before = pool.clone()
    result = make_backend("auto", pool, num_heads, layers=in_window(window, pool)).plan(rows)(layer, q, kv)
    before[layer, rows.slot_mapping] = in_bytes(kv)
    assert (from_bytes(pool) - from_bytes(before)).abs().max() < 0.05  # a number between two steps may go to either
    assert torch.equal(pool[1 - layer], before[1 - layer])
    expected = naive(shapes, rows, from_bytes(pool[layer]), q, window)
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
def test_what_is_not_finite_stays_so_in_int8() -> None:
    pool = make_pool(1, NUM_SLOTS, 1, DIM, torch.int8, torch.device("cpu"))
    rows = make_batch([1, 1, 1], [np.array([20]), np.array([30]), np.array([40])], [None] * 3)
    q, kv = torch.randn(3, 1, DIM), torch.randn(3, 2, 1, DIM)
    kv[0, 0, 0, 3], kv[1, 1, 0, 2], kv[2, :] = torch.nan, torch.inf, 0.0
    result = make_backend("auto", pool, 1).plan(rows)(0, q, kv)
    assert not result[:2].isfinite().any()
    assert (result[2] == 0).all()


def test_a_pool_in_int8_needs_the_kernels() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype=int8 needs the compiled CPU kernels.*attention_backend=torch"
    ):
        check_kv_dtype("int8", "torch", torch.device("cpu"))


# ---- pools in float8 -------------------------------------------------------------------------------------------------

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
float8 = st.sampled_from(FLOAT8)


@compiled
@given(float8, batches, st.booleans(), st.integers(0, 1), st.sampled_from(GROUPINGS), windows)
@at_most(40)
def test_a_pool_in_float8_is_read_and_written_number_by_number(
    backend: str,
    dtype: torch.dtype,
    shapes: list[RequestShape],
    scattered: bool,
    layer: int,
    grouping: tuple[int, int],
    window: int | None,
) -> None:
    check_batch(backend, shapes, scattered, layer, grouping, window, dtype)


@given(float8, batches, st.booleans(), st.integers(0, 1), st.sampled_from(GROUPINGS), windows)
@at_most(12)
def test_a_pool_in_float8_is_read_and_written_in_tritons_interpreter(
    dtype: torch.dtype,
    shapes: list[RequestShape],
    scattered: bool,
    layer: int,
    grouping: tuple[int, int],
    window: int | None,
) -> None:
    check_batch("triton", shapes, scattered, layer, grouping, window, dtype)


@backends
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_number_of_float8_is_read(dtype: torch.dtype, backend: str) -> None:
    """A query with one key has its value for a result. Codes are in a row, those of infinities and NaN left out."""
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    pool = make_pool(1, 64, 1, 256, dtype, torch.device("cpu"))
    as_bytes(pool)[0, 20, 1, 0] = as_bytes(codes.float().nan_to_num(0, 0, 0).to(dtype))
    rows = make_batch([1], [np.array([20])], [None])
    result = make_backend(backend, pool, 1).plan(rows)(0, torch.zeros(1, 1, 256), None)
    assert torch.equal(result[0], pool[0, 20, 1, 0].float())


@backends
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_is_not_a_number_stays_so_in_float8(dtype: torch.dtype, backend: str) -> None:
    rows = make_batch([1, 1], [np.array([20]), np.array([30])], [None] * 2)
    pool = make_pool(1, NUM_SLOTS, 1, DIM, dtype, torch.device("cpu"))
    kv = torch.ones(2, 2, 1, DIM)
    kv[0] = torch.nan
    result = make_backend(backend, pool, 1).plan(rows)(0, torch.ones(2, 1, DIM), kv)
    assert result[0].isnan().all()
    assert (result[1] == 1).all()


def numbers_for(dtype: torch.dtype) -> Tensor:
    """Every number of float8, those halfway between two, and their neighbours; what is too large or small for it."""
    codes = torch.arange(256).to(torch.uint8).view(dtype).double().nan_to_num(0, 0, 0).unique()
    ties = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat((codes, ties, codes[-1] * torch.tensor([1.01, 1.2, 9.0, torch.inf, -1.2]))).float()
    near = torch.cat((exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf))))
    return torch.cat((near, torch.randn(1024) * 8, torch.tensor([1e-30, -1e-30, -0.0, torch.nan])))


@pytest.mark.parametrize("kernel", ["auto", "triton"])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_kernels_round_to_float8_as_torch_does(dtype: torch.dtype, kernel: str) -> None:
    torch.manual_seed(0)
    numbers = numbers_for(dtype)
    numbers = torch.cat((numbers, torch.zeros(-len(numbers) % 64))).view(-1, 1, 64)
    count = len(numbers)
    pools = [make_pool(1, count + 16, 1, 64, dtype, torch.device("cpu")) for _ in range(2)]
    slots, kv = torch.arange(16, count + 16), numbers[:, None].expand(-1, 2, -1, -1).contiguous()
    is_lost = kv.isnan().any(-1, keepdim=True)  # stored as zeros by Triton, see `rotate_head`
    write_kv(pools[0][0], slots, kv.masked_fill(is_lost, 0.0) if kernel == "triton" else kv)
    if kernel == "auto":
        batch = make_batch([1] * count, list(slots[:, None].numpy()), [None] * count)
        make_backend("auto", pools[1], 1).plan(batch)(0, torch.zeros(count, 1, 64), kv)
    else:  # values alone: keys are rotated
        layers = pytest.importorskip("specray.ops.gpu.layers")
        cos, sin = torch.ones(count, 1, 64), torch.zeros(count, 1, 64)
        qkv = kv.flatten(1, 2)[:, [0, 0, 1]]
        layers.rotate_and_store(qkv, cos, sin, None, 1.0, pools[1][0], slots)
    stored = [as_bytes(pool)[0, :, 1] for pool in pools]
    assert torch.equal(*stored)
    assert not stored[0][:16].any()


def test_overlapping_moves_read_the_old_values() -> None:
    pool = torch.arange(10.0).view(1, 10, 1, 1, 1).clone()
    move_kv(pool, torch.tensor([4, 5, 7]), torch.tensor([3, 4, 5]))
    assert pool.flatten().tolist() == [0, 1, 2, 4, 5, 7, 6, 7, 8, 9]


# ---- the compiled kernels: one token, one result --------------------------------------------------------------------

WAYS = (
    LayerAttention(),
    LayerAttention(window=70),
    LayerAttention(window=70, scale=0.3, softcap=5.0, sinks=torch.linspace(-1, 2, KV_HEADS * FOLD)),
)


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("way", WAYS, ids=["default", "window", "all"])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, *FLOAT8], ids=str)
@pytest.mark.parametrize("dim", [16, 40, 64, 256])
def test_a_token_has_the_same_bits_alone_in_a_chunk_in_a_batch_and_in_a_tree(
    dim: int, pool_dtype: torch.dtype, way: LayerAttention
) -> None:
    """149 tokens, of which the last are also nodes of a tree between nodes of other branches."""
    torch.manual_seed(0)
    length, width = 149, KV_HEADS * FOLD
    dtype = torch.bfloat16 if pool_dtype.itemsize == 1 else pool_dtype
    q = torch.randn(length, width, dim).to(dtype)
    kv = torch.randn(length, 2, KV_HEADS, dim).to(dtype)
    slots = np.random.default_rng(0).permutation(np.arange(16, NUM_SLOTS))

    def run(batch: AttentionBatch, queries: Tensor, new: Tensor, past: np.ndarray) -> Tensor:
        pool = make_pool(1, NUM_SLOTS, KV_HEADS, dim, pool_dtype, torch.device("cpu"))
        backend = make_backend("auto", pool, width, layers=[way])
        if len(past):  # computed before, and written by the kernel
            earlier = make_batch([len(past)], [past], [None])
            backend.plan(earlier)(0, q[: len(past)], kv[: len(past)])
        return backend.plan(batch)(0, queries, new)

    at_once = run(make_batch([length], [slots[:length]], [None]), q, kv, slots[:0])
    for start in (1, 63, 64, 100, length - 1):
        chunk = run(make_batch([length - start], [slots[:length]], [None]), q[start:], kv[start:], slots[:start])
        assert torch.equal(chunk, at_once[start:])
        other = make_batch([3, length - start], [slots[-7:], slots[:length]], [None, None])
        both = run(other, torch.cat((q[:3], q[start:])), torch.cat((kv[:3], kv[start:])), slots[:start])
        assert torch.equal(both[3:], at_once[start:])
    # Nodes 0, 2, 3 and 6 are the tokens 145 to 148; the others are different tokens.
    parents, path, start = [-1, 0, 0, 2, 1, 2, 3], [0, 2, 3, 6], length - 4
    queries, new = torch.randn(7, width, dim).to(dtype), torch.randn(7, 2, KV_HEADS, dim).to(dtype)
    queries[path], new[path] = q[start:], kv[start:]
    tree = run(make_batch([7], [slots[: start + 7]], [ancestors(parents)]), queries, new, slots[:start])
    assert torch.equal(tree[path], at_once[start:])
