"""flashinfer's own kernels against torch's in float32. The first run compiles them, which takes minutes.

tests/unit/ops/test_gpu_libraries.py is the CPU twin, on a model of flashinfer's calls.
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("flashinfer", reason="needs the package flashinfer-python")

from specray.config import SpeculativeConfig
from specray.ops.attention import AttentionBatch
from specray.ops.attention_torch import TorchAttention
from specray.ops.backends import make_backend
from specray.ops.gpu.attention import TritonAttention
from specray.ops.gpu.flashinfer_attention import FEW_QUERIES, FlashInferReader
from specray.ops.gpu.routed_attention import RoutedAttention
from specray.ops.layer_attention import LayerAttention
from specray.sampling_params import SamplingParams
from tests.support import toy
from tests.support.engine import generate
from tests.support.methods import METHODS, Make, standalone
from tests.support.needs_gpu import NEEDS_GPU
from tests.unit.ops.test_attention import RequestShape, ancestors, make_batch

pytestmark = NEEDS_GPU

LAYERS, SLOTS, PAGE = 2, 8192, 16
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a query's and head's result, by its norm


class Kind(NamedTuple):
    dtype: torch.dtype
    kv_heads: int
    fold: int  # query heads per KV head
    dim: int


KINDS = [
    Kind(torch.bfloat16, 8, 4, 128),
    Kind(torch.float16, 3, 3, 64),
    Kind(torch.bfloat16, 2, 8, 256),
]
TREE = [-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 12]
CHUNKS = [RequestShape(0, 300, [-1]), RequestShape(700, 129, [-1]), RequestShape(5, 9, [-1])]
DECODING = [RequestShape(20, 1, [-1]), RequestShape(3000, 1, [-1]), RequestShape(0, 1, [-1])]
TREES = [RequestShape(1500, 1, TREE), RequestShape(13, 1, TREE[:6]), RequestShape(0, 6, [-1, 0, 0])]
CHAINS = [RequestShape(700, 1, [-1, 0, 1, 2]), RequestShape(30, 1, [-1, 0, 1, 2, 3, 4, 5, 6])]
BATCHES = {"chunks": CHUNKS, "decoding": DECODING, "trees": TREES, "all": [*CHUNKS, *TREES, *DECODING]}

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.dim}")


DEFAULT = LayerAttention()


@pytest.fixture(params=[0, FEW_QUERIES, SLOTS])
def few_queries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with up to so many queries are FlashAttention-2's; others what flashinfer chooses, on Hopper 3's."""
    monkeypatch.setattr("specray.ops.gpu.flashinfer_attention.FEW_QUERIES", request.param)


def rows_of(shapes: list[RequestShape], are_chains: bool = False) -> AttentionBatch:
    """On the GPU, with scattered KV slots."""
    order = np.random.default_rng(1).permutation(np.arange(PAGE, SLOTS))
    counts = [shape.num_known + len(shape.parents) - 1 for shape in shapes]
    ends = np.cumsum([shape.num_past + count for shape, count in zip(shapes, counts, strict=True)])
    trees = [ancestors(shape.parents) if len(shape.parents) > 1 else None for shape in shapes]
    rows = make_batch(counts, np.split(order, ends)[:-1], trees)
    return rows._replace(
        kv_slots=rows.kv_slots.cuda(),
        slot_mapping=rows.slot_mapping.cuda(),
        tree_mask=None if rows.tree_mask is None else rows.tree_mask.cuda(),
        are_chains=are_chains,
    )


def make_kv(kind: Kind, rows: AttentionBatch) -> Tensor:
    """A pool with NaN in all KV slots that are not the batch's."""
    torch.manual_seed(0)
    pool = torch.full((LAYERS, SLOTS, 2, kind.kv_heads, kind.dim), torch.nan, dtype=kind.dtype, device="cuda")
    pool[:, :PAGE] = 0
    for slots, length in zip(rows.kv_slots, rows.kv_lens, strict=True):
        pool[:, slots[:length]] = torch.randn_like(pool[:, :length])
    return pool


def inputs(kind: Kind, rows: AttentionBatch) -> tuple[Tensor, Tensor]:
    """(q, kv)"""
    total = sum(rows.query_lens)
    q = torch.randn(total, kind.kv_heads * kind.fold, kind.dim, dtype=kind.dtype, device="cuda")
    return q, torch.randn(total, 2, kind.kv_heads, kind.dim, dtype=kind.dtype, device="cuda")


def backend_of(kind: Kind, pool: Tensor, tree_mode: str = "prefill", way: LayerAttention = DEFAULT) -> RoutedAttention:
    backend = make_backend("flashinfer", pool, kind.kv_heads * kind.fold, None, tree_mode, [DEFAULT, way])
    assert isinstance(backend, RoutedAttention)
    return backend


def require_close(kind: Kind, result: Tensor, expected: Tensor) -> None:
    a, b = (each.float().unflatten(1, (-1, kind.dim)) for each in (result, expected))
    error = float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())
    assert error < TOLERANCE[kind.dtype], error  # not NaN either


def check(kind: Kind, rows: AttentionBatch, tree_mode: str = "prefill", way: LayerAttention = DEFAULT) -> None:
    pool = make_kv(kind, rows)
    q, kv = inputs(kind, rows)
    reference = TorchAttention(pool.float(), q.shape[1], [DEFAULT, way]).plan(rows)(1, q.float(), kv.float())
    require_close(kind, backend_of(kind, pool, tree_mode, way).plan(rows)(1, q, kv), reference)
    assert torch.equal(pool[1, rows.slot_mapping], kv)


@kinds
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.usefixtures("few_queries")
def test_every_query_attends_to_what_the_batch_says(kind: Kind, name: str) -> None:
    check(kind, rows_of(BATCHES[name]))


@kinds
@pytest.mark.usefixtures("few_queries")
def test_chains_are_causal(kind: Kind) -> None:
    check(kind, rows_of([*CHAINS, *DECODING], are_chains=True))


@pytest.mark.parametrize("name", BATCHES)
def test_trees_can_be_tritons(name: str) -> None:
    check(KINDS[0], rows_of(BATCHES[name]), tree_mode="decode")


@pytest.mark.parametrize("window", [1, 7, 100, 4000])
@pytest.mark.usefixtures("few_queries")
def test_windows(window: int) -> None:
    """Trees in a window are Triton's."""
    check(KINDS[0], rows_of([*CHUNKS, *DECODING]), way=LayerAttention(window=window))
    check(KINDS[0], rows_of([*CHUNKS, *TREES]), way=LayerAttention(window=window))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_sinks(has_sinks: bool) -> None:
    """Layers with sinks are Triton's."""
    kind = KINDS[0]
    sinks = torch.linspace(-1, 2, kind.kv_heads * kind.fold) if has_sinks else None
    check(kind, rows_of([*CHUNKS, *DECODING, *TREES]), way=LayerAttention(scale=0.3, softcap=5.0, sinks=sinks))


@kinds
@pytest.mark.usefixtures("few_queries")
def test_queries_may_be_a_part_of_a_projection(kind: Kind) -> None:
    """As models call it: q, k and v in one tensor, rotated in place."""
    rows = rows_of(BATCHES["all"])
    pool = make_kv(kind, rows)
    (q, kv), angles = inputs(kind, rows), torch.rand(sum(rows.query_lens), 1, kind.dim // 2, device="cuda")
    qkv = torch.cat((q, kv.flatten(1, 2)), 1)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    exact = pool.clone()
    expected = TritonAttention(exact, q.shape[1]).plan(rows).rotated(1, qkv.clone(), cos, sin, None, 1e-6)
    result = backend_of(kind, pool).plan(rows).rotated(1, qkv, cos, sin, None, 1e-6)
    require_close(kind, result, expected)
    assert torch.equal(pool[1, rows.slot_mapping], exact[1, rows.slot_mapping])


@pytest.mark.parametrize("name", ["decoding", "trees"])
@pytest.mark.usefixtures("few_queries")
def test_plans_do_not_wait_for_the_steps_before_them(name: str) -> None:
    """The host plans thirty steps at once, of requests that grow."""
    kind = KINDS[0]
    steps = [rows_of([shape._replace(num_past=shape.num_past + step) for shape in BATCHES[name]]) for step in range(30)]
    pool = torch.randn(LAYERS, SLOTS, 2, kind.kv_heads, kind.dim, device="cuda").to(kind.dtype)
    pool[:, :PAGE] = 0
    q, kv = inputs(kind, steps[0])
    backend, reference = backend_of(kind, pool.clone()), TorchAttention(pool.float(), q.shape[1])
    torch.cuda._sleep(1 << 28)  # about a tenth of a second in which nothing runs
    results = [backend.plan(rows)(1, q, kv) for rows in steps]
    for rows, result in zip(steps, results, strict=True):
        require_close(kind, result, reference.plan(rows)(1, q.float(), kv.float()))


@pytest.mark.parametrize(
    ("make", "options", "kernels"),
    [
        (METHODS["EAGLE3"], {"draft_attention_backend": "triton"}, {"causal", "trees"}),
        (METHODS["EAGLE3"], {"draft_attention_backend": "triton", "attention_mode": "decode"}, {"causal"}),
        (METHODS["EAGLE3-chain"], {"draft_attention_backend": "triton"}, {"causal"}),
        (standalone(shape=(3, 3, 10), variant="wide"), {}, {"causal", "trees"}),  # the draft model's prefixes too
    ],
)
def test_the_text_is_that_of_triton(
    make: Make, options: dict[str, str], kernels: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole engine in float16. The toy's logits lie far apart."""
    monkeypatch.setitem(toy.VARIANTS, "wide", {"head_dim": 64})
    target = tmp_path / "target"
    target.mkdir()
    toy.write_toy(target, "wide")
    prompts = [[0, 9, 8, 7, 6, 5, 9, 8], [0, *range(4, 60)]]
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * 2
    engine: dict[str, Any] = {"device": "cuda", "dtype": "float16", "disable_cuda_graph": True}
    expected = generate(target, prompts, params, attention_backend="triton", **engine)
    planned: Counter[str] = Counter()
    plan = FlashInferReader.plan

    def counted(self: FlashInferReader, batch: AttentionBatch) -> Any:
        planned["trees" if self._masks_trees else "causal"] += 1
        return plan(self, batch)

    monkeypatch.setattr(FlashInferReader, "plan", counted)
    speculative = SpeculativeConfig(**make(target, tmp_path).model_dump() | options)
    seen = generate(target, prompts, params, attention_backend="flashinfer", speculative=speculative, **engine)
    assert [each.token_ids for each in seen] == [each.token_ids for each in expected]
    assert set(planned) == kernels
