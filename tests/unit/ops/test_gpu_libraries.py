"""flashinfer and flash-attention: our calls fit the packages' signatures, and our arrays mean what the batch says."""

import inspect
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specray.errors import ConfigError
from specray.ops import backends
from specray.ops.attention import AttentionBatch
from specray.ops.attention_torch import TorchAttention
from specray.ops.gpu.page_index import block_table, packed_mask, slot_pages
from specray.ops.layer_attention import LayerAttention, complete_layers, layer_pools
from tests.support import attention_libraries
from tests.support.fake_cuda import fake_cuda
from tests.support.signatures import recorded, signature, signature_in
from tests.unit.ops.test_attention import NUM_SLOTS, RequestShape, make_rows, row_shapes, slots_of, visible

pytest.importorskip("triton")

from specray.ops.gpu.attention import TritonAttention
from specray.ops.gpu.flash_attention import FlashAttentionReader
from specray.ops.gpu.flashinfer_attention import FlashInferReader
from specray.ops.gpu.routed_attention import LayerRoute, RoutedAttention

KV_HEADS, FOLD, DIM = 2, 3, 8
PAGE = 16
LIBRARY: Any = attention_libraries
CHUNK = RequestShape(num_past=5, num_known=9, parents=[-1])
DECODING = RequestShape(num_past=20, num_known=1, parents=[-1])
TREE = RequestShape(num_past=13, num_known=1, parents=[-1, 0, 0, 1, 2, 2])
CHAIN = RequestShape(num_past=30, num_known=1, parents=[-1, 0, 1, 2])
LONG_CHUNK = RequestShape(num_past=5, num_known=100, parents=[-1])
DEFAULT = LayerAttention()
DRAFTED_PROMPT = RequestShape(num_past=0, num_known=6, parents=[-1, 0, 0])

shapes = st.lists(row_shapes(longest=20), min_size=1, max_size=4)
drafted = shapes.map(lambda rows: [row for row in rows if len(row.parents) > 1]).filter(bool)


def run(
    backend: Any, rows: AttentionBatch, num_slots: int = NUM_SLOTS, layers: Sequence[LayerAttention] = (DEFAULT,) * 2
) -> tuple[Tensor, Tensor]:
    """Results of `backend` and of the torch kernels, which test_attention compares with the definition, in layer 1."""
    torch.manual_seed(len(rows.query_lens))
    pool = torch.randn(2, num_slots, 2, KV_HEADS, DIM)
    pool[:, :PAGE] = 0
    total = sum(rows.query_lens)
    q, kv = torch.randn(total, KV_HEADS * FOLD, DIM), torch.randn(total, 2, KV_HEADS, DIM)
    copies = pool.clone(), pool.clone()
    result = backend(copies[0], layers).plan(rows)(1, q, kv)
    expected = TorchAttention(copies[1], KV_HEADS * FOLD, layers).plan(rows)(1, q, kv)
    assert torch.equal(*copies)
    return result, expected


def flashinfer(pool: Tensor, layers: Sequence[LayerAttention]) -> RoutedAttention:
    """Without Triton's kernels."""
    triton = TritonAttention(pool, KV_HEADS * FOLD, layers)
    readers = [FlashInferReader(LIBRARY, triton.layers[1], triton.pools, masks) for masks in (False, True)]
    return RoutedAttention(triton, [LayerRoute(readers[0].plan, readers[1].plan)] * 2)


def flash_attention(pool: Tensor, layers: Sequence[LayerAttention]) -> RoutedAttention:
    def no_trees(_: AttentionBatch) -> Any:
        raise AssertionError("flash-attention has no masks")

    triton = TritonAttention(pool, KV_HEADS * FOLD, layers)
    causal = FlashAttentionReader(LIBRARY, PAGE, triton.layers, triton.pools).plan
    return RoutedAttention(triton, [LayerRoute(causal, no_trees)] * 2)


@given(shapes, st.booleans())
@settings(max_examples=40)
def test_flashinfer_sees_what_the_batch_says(rows: list[RequestShape], scattered: bool) -> None:
    """Chunks, decoding, trees and chains in one batch; KV slots in any order."""
    torch.testing.assert_close(*run(flashinfer, make_rows(rows, scattered)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 100])
def test_flashinfer_has_windows_without_trees(window: int) -> None:
    rows, layers = make_rows([CHUNK, DECODING], scattered=True), [DEFAULT, LayerAttention(window=window)]
    torch.testing.assert_close(*run(flashinfer, rows, layers=layers), atol=1e-5, rtol=1e-5)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=4), st.none() | st.integers(1, 60)
)
@settings(max_examples=30)
def test_flash_attention_sees_what_the_batch_says(sizes: list[tuple[int, int]], window: int | None) -> None:
    """Chunks and decoding over pages in any order."""
    pages = 1 + np.random.default_rng(0).permutation(25)
    kv_slots, query_lens = [], []
    for past, known in sizes:
        used, pages = pages[: -(-(past + known) // PAGE)], pages[-(-(past + known) // PAGE) :]
        kv_slots.append((used[:, None] * PAGE + np.arange(PAGE)).flatten()[: past + known])
        query_lens.append(known)
    rows, layers = paged_batch(query_lens, kv_slots), [DEFAULT, LayerAttention(window=window)]
    torch.testing.assert_close(*run(flash_attention, rows, layers=layers), atol=1e-5, rtol=1e-5)


def paged_batch(query_lens: list[int], kv_slots: list[np.ndarray]) -> AttentionBatch:
    width = max(len(slots) for slots in kv_slots) + 3
    table = np.stack([np.pad(slots, (0, width - len(slots)), constant_values=NUM_SLOTS - 1) for slots in kv_slots])
    written = np.concatenate([slots[-count:] for slots, count in zip(kv_slots, query_lens, strict=True)])
    return AttentionBatch(
        query_lens,
        [len(slots) for slots in kv_slots],
        torch.from_numpy(table),
        torch.from_numpy(written),
        [(0, 0)] * len(query_lens),
    )


@given(drafted)
@settings(max_examples=60)
def test_a_packed_mask_has_a_bit_for_each_query_and_key(rows: list[RequestShape]) -> None:
    batch = make_rows(rows, scattered=True)
    mask = packed_mask(batch)
    starts = mask.starts.tolist()
    assert len(mask.bits) == starts[-1]
    for place, (row, queries, keys) in enumerate(zip(rows, batch.query_lens, batch.kv_lens, strict=True)):
        wanted = visible(row, None)
        stored = np.unpackbits(mask.bits[starts[place] : starts[place + 1]].numpy(), bitorder="little")
        assert np.array_equal(stored[: queries * keys].reshape(queries, keys), wanted)
        assert len(stored) - queries * keys < 8


def test_a_level_of_a_draft_tree_sees_its_ancestors_in_all_levels() -> None:
    """Two queries whose tree has four keys, as drafters grow it: the last queries are fewer than the tree's keys."""
    slots = torch.arange(16, 16 + 9)[None]
    tree = torch.tensor([[[1, 0, 1, 0], [1, 0, 0, 1]]], dtype=torch.bool)
    batch = AttentionBatch([2], [9], slots, slots[0, -2:], [(2, 4)], tree)
    bits = np.unpackbits(packed_mask(batch).bits.numpy(), bitorder="little")[:18].reshape(2, 9)
    assert bits.tolist() == [[1, 1, 1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0, 1]]
    torch.testing.assert_close(*run(flashinfer, batch), atol=1e-5, rtol=1e-5)


@given(shapes, st.booleans())
@settings(max_examples=30)
def test_page_tables_list_the_slots_of_each_request(rows: list[RequestShape], scattered: bool) -> None:
    batch = make_rows(rows, scattered)
    pages = slot_pages(batch)
    starts = pages.kv_starts.tolist()
    listed = [pages.slots[first:end].tolist() for first, end in pairwise(starts)]
    assert listed == [slots.tolist() for slots in slots_of(batch)]
    assert pages.query_starts.diff().tolist() == batch.query_lens


def test_a_block_table_has_a_block_for_each_page() -> None:
    kv_slots = [np.r_[48:64, 16:20], np.r_[32:37]]
    table = block_table(paged_batch([3, 5], kv_slots), PAGE)
    assert table.blocks[0].tolist() == [3, 1]
    assert table.blocks[1, 0] == 2
    assert (table.query_starts.tolist(), table.kv_lens.tolist()) == ([0, 3, 8], [20, 5])


def test_offsets_in_bits_would_show_a_request_anothers_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own offsets, which FlashInferReader replaces, are wrong for all requests but the first."""
    monkeypatch.setattr(
        LIBRARY.BatchPrefillWithPagedKVCacheWrapper, "_mask_indptr_buf", property(_first, _keep_first), raising=False
    )
    result, expected = run(flashinfer, make_rows([TREE, TREE], scattered=False))
    size = len(result) // 2
    torch.testing.assert_close(result[:size], expected[:size], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(result[size:], expected[size:], atol=1e-2)


def _first(wrapper: Any) -> Tensor:
    kept: Tensor = wrapper.__dict__["kept"]
    return kept


def _keep_first(wrapper: Any, value: Tensor) -> None:
    wrapper.__dict__.setdefault("kept", value)


@pytest.mark.parametrize("backend", [flashinfer, flash_attention])
def test_chains_are_causal(backend: Any) -> None:
    """As prompts are: without a mask."""
    rows = in_pages(make_rows([CHAIN, DECODING, CHAIN, CHUNK], scattered=False))._replace(are_chains=True)
    torch.testing.assert_close(*run(backend, rows), atol=1e-5, rtol=1e-5)


def test_only_the_latest_plan_can_be_read() -> None:
    pool = torch.zeros(2, NUM_SLOTS, 2, KV_HEADS, DIM)
    layers = complete_layers(pool, KV_HEADS * FOLD)
    reader = FlashInferReader(LIBRARY, layers[0], layer_pools(pool, layers), masks_trees=False)
    rows = make_rows([DECODING], scattered=False)
    first, second = reader.plan(rows), reader.plan(rows)
    q = torch.zeros(1, KV_HEADS * FOLD, DIM)
    second(0, q)
    with pytest.raises(AssertionError, match="another batch was planned"):
        first(0, q)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice of backends as on a GPU with both packages."""
    monkeypatch.setattr(backends, "_library", lambda *_: LIBRARY)
    monkeypatch.setattr("specray.ops.gpu.flashinfer_attention.HEAD_DIMS", (DIM,))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("name", "page_size", "mode"),
    [
        ("flashinfer", PAGE, "prefill"),
        ("flashinfer", PAGE, "decode"),
        ("flashinfer", None, "decode"),
        ("fa", PAGE, "prefill"),
    ],
)
def test_every_choice_computes_the_same(name: str, page_size: int | None, mode: str) -> None:
    """Trees by the library's mask, or by Triton's kernel in its interpreter."""
    rows = make_rows([CHUNK, TREE, DECODING, CHAIN, DRAFTED_PROMPT], scattered=name == "flashinfer")
    if name == "fa":
        rows = in_pages(rows)
    choice = lambda pool, layers: backends.make_backend(name, pool, KV_HEADS * FOLD, page_size, mode, layers)  # noqa: E731
    assert isinstance(choice(torch.zeros(2, NUM_SLOTS, 2, KV_HEADS, DIM), None), RoutedAttention)
    torch.testing.assert_close(*run(choice, rows, NUM_SLOTS * 2), atol=1e-4, rtol=1e-4)


def in_pages(rows: AttentionBatch) -> AttentionBatch:
    """The same requests in whole pages."""
    width = rows.kv_slots.shape[1]
    pages = -(-width // PAGE)
    first = PAGE * (1 + torch.arange(len(rows.kv_lens))[:, None] * pages)
    table = (first + torch.arange(width)).long()
    written = [
        table[r, kv_len - count : kv_len]
        for r, (count, kv_len) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True))
    ]
    return rows._replace(kv_slots=table, slot_mapping=torch.cat(written))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", ["flashinfer", "fa"])
@pytest.mark.parametrize(
    "way",
    [
        LayerAttention(window=6),
        LayerAttention(scale=0.9, softcap=1.5),
        LayerAttention(window=9, softcap=2.0),
        LayerAttention(window=6, sinks=torch.linspace(-1, 2, KV_HEADS * FOLD)),
    ],
    ids=["window", "softcap", "window and softcap", "sinks"],
)
def test_what_a_library_does_not_have_is_tritons(name: str, way: LayerAttention) -> None:
    """Trees in windows, and sinks. The other layer is a default one, which has its own plan."""
    rows = in_pages(make_rows([TREE, CHUNK], scattered=False))
    choice = lambda pool, layers: backends.make_backend(name, pool, KV_HEADS * FOLD, PAGE, "prefill", layers)  # noqa: E731
    torch.testing.assert_close(*run(choice, rows, NUM_SLOTS * 2, layers=[DEFAULT, way]), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("shapes", "kernels"),
    [([DECODING, TREE, CHAIN], ["fa2", "fa2"]), ([DECODING], ["fa2"]), ([LONG_CHUNK, DECODING], ["auto"])],
)
def test_few_queries_have_flashattention_2s_kernels(
    shapes: list[RequestShape], kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """flashinfer's own choice on Hopper is slow for them: its tiles have 128 queries."""
    planned: list[str] = []
    plan = LIBRARY.BatchPrefillWithPagedKVCacheWrapper.plan

    def recorded_plan(self: Any, *args: Any, **options: Any) -> None:
        planned.append(self._backend)
        plan(self, *args, **options)

    monkeypatch.setattr(LIBRARY.BatchPrefillWithPagedKVCacheWrapper, "plan", recorded_plan)
    choice = lambda pool, layers: backends.make_backend("flashinfer", pool, KV_HEADS * FOLD, None, "prefill", layers)  # noqa: E731
    torch.testing.assert_close(*run(choice, make_rows(shapes, scattered=True)), atol=1e-5, rtol=1e-5)
    assert planned == kernels


@pytest.mark.usefixtures("on_a_gpu")
def test_rows_with_holes_are_not_flash_attentions() -> None:
    """A drafter's KV slots are not in whole blocks, so Triton's kernels read them."""
    pool = torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, DIM)
    assert isinstance(backends.make_backend("fa", pool, KV_HEADS * FOLD), TritonAttention)


@pytest.mark.usefixtures("on_a_gpu")
def test_sizes_without_a_kernel_are_refused() -> None:
    pool = torch.zeros(1, NUM_SLOTS, 2, 1, 576)
    with pytest.raises(ConfigError, match=r"attention_backend=flashinfer has kernels for heads of 8, and .* 576"):
        backends.make_backend("flashinfer", pool, 4)
    with pytest.raises(ConfigError, match=r"attention_backend=fa has kernels for heads of up to 256, and .* 576"):
        backends.make_backend("fa", pool, 4, PAGE)
    with pytest.raises(
        ConfigError, match="attention_backend=fa needs a page_size that is a multiple of 16, and it is 8"
    ):
        backends.make_backend("fa", pool[..., :8], 4, 8)


@pytest.mark.parametrize("name", ["flashinfer", "fa"])
def test_a_cpu_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend={name} needs an NVIDIA GPU, and the device is cpu"):
        backends.make_backend(name, torch.zeros(1, NUM_SLOTS, 2, KV_HEADS, DIM), KV_HEADS * FOLD)


@pytest.mark.parametrize(("name", "package"), [("flashinfer", "flashinfer-python"), ("fa", "vllm")])
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, NUM_SLOTS, 2, 1, 64))
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"attention_backend={name} needs the package {package} .*specray\[{name}\]"):
        backends.make_backend(name, pool, 1, PAGE)
    monkeypatch.setattr(backends, "find_spec", lambda _: object())
    for module in ("flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}, which cannot be imported"):
        backends.make_backend(name, pool, 1, PAGE)
    pool.dtype = torch.float32
    with pytest.raises(ConfigError, match=r"computes in bfloat16 and float16, and the dtype is torch.float32"):
        backends.make_backend(name, pool, 1, PAGE)


def test_the_recorded_signatures_name_their_versions() -> None:
    assert {name: (facts["version"], facts["licence"]) for name, facts in recorded().items()} == {
        "flashinfer-python": ("0.7.2.post1", "Apache-2.0"),
        "vllm": ("0.32.0", "Apache-2.0"),
    }


def test_signatures_are_read_from_sources() -> None:
    source = "class A:\n def f(self): ...\n def f(self, a, /, b, c=1, *args, d, e=None, **others): ...\n"
    assert str(signature_in(source, "A.f")) == "(self, a, /, b, c=None, *args, d, e=None, **others)"
    plan = signature("flashinfer-python", "BatchPrefillWithPagedKVCacheWrapper.plan")
    assert list(plan.parameters)[:5] == [
        "self",
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
    ]
    assert plan.parameters["page_size"].default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="missing a required argument"):
        plan.bind(None, 1, 2)


def test_the_arrays_are_made_on_the_gpu_without_reading_it() -> None:
    """On a GPU of fake tensors, where mixed devices and reads by the host are errors."""
    rows = make_rows([TREE, CHUNK, CHAIN], scattered=False)
    with fake_cuda():
        gpu = torch.device("cuda", 0)
        assert rows.tree_mask is not None
        kv_slots, written, tree_mask = (
            torch.zeros(part.shape, dtype=part.dtype, device=gpu)
            for part in (rows.kv_slots, rows.slot_mapping, rows.tree_mask)
        )
        batch = rows._replace(kv_slots=kv_slots, slot_mapping=written, tree_mask=tree_mask)
        pages, mask, table = slot_pages(batch), packed_mask(batch), block_table(batch, PAGE)
        seen: list[AttentionBatch] = []

        def plan(part: AttentionBatch) -> Any:
            seen.append(part)
            return lambda _layer, q: q.flatten(1)

        def plan_trees(part: AttentionBatch) -> Any:
            return plan(part)

        pool = torch.zeros(2, NUM_SLOTS, 2, KV_HEADS, DIM, device=gpu)
        q = torch.zeros(sum(rows.query_lens), KV_HEADS * FOLD, DIM, device=gpu)
        kv = torch.zeros(len(q), 2, KV_HEADS, DIM, device=gpu)
        triton: Any = SimpleNamespace(layers=[DEFAULT] * 2, pools=pool.unbind())
        out = RoutedAttention(triton, [LayerRoute(plan, plan_trees)] * 2).plan(batch)(0, q, kv)
        arrays = [pages.slots, *mask, *table, out, *(part.kv_slots for part in seen)]
        assert {array.device for array in arrays} == {gpu}
        assert {array.device.type for array in (pages.query_starts, pages.kv_starts, pages.last_page_lens)} == {"cpu"}
    assert [part.query_lens for part in seen] == [[rows.query_lens[1]], [rows.query_lens[0], rows.query_lens[2]]]
