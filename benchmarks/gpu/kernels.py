"""The part `kernels`: the time of each kernel, with the limits of memory and tensor cores.

Bytes are what a kernel has to read and write once, operations two for each product and sum; so a kernel that reads
something twice shows a lower rate. Calls do not find their inputs in the L2 cache.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu.cases import EPS, SHAPES, TINY, Shape, Tokens
from benchmarks.gpu.report import Cell, Order, Report
from specray.ops.gpu import kv, layers, sampling
from specray.ops.gpu.attention import TritonAttend
from specray.ops.gpu.few_rows import GpuMatrix
from specray.ops.gpu.matrix import TiledMatrix
from specray.ops.noise import noise_keys
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.spec_decode.verify_batch import VerifyOutput
from specray.step import SamplingOptions

HEADERS = ["kernel", "us", "GB/s", "TFLOPS"]


class Sizes(NamedTuple):
    """Sizes beside those of a model."""

    vocab: int
    context: int
    batch: int  # requests that decode together
    chunk: int  # tokens of a prompt
    copy: int  # numbers of the copy that shows the memory's rate
    square: int  # of the product that shows the tensor cores' rate


FULL = Sizes(vocab=128_256, context=4096, batch=64, chunk=512, copy=1 << 29, square=8192)
SMALL = Sizes(vocab=300, context=80, batch=3, chunk=20, copy=1 << 10, square=32)  # to test the program without a GPU


class Timed(NamedTuple):
    """A call, and what it has to move and compute."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    num_operations: int = 0


class Measurement(NamedTuple):
    name: str
    seconds: float
    gigabytes_per_s: float
    teraflops: float


def report(order: Order) -> Report:
    shape, sizes = (TINY, SMALL) if order.is_tiny else (SHAPES[0], FULL)
    found = list(order.time_limit.in_time(measure(shape, sizes, order.device)))
    return Report(HEADERS, table_rows(found), 1, f"{shape.name}, bfloat16", cells(found, sizes))


def cells(found: list[Measurement], sizes: Sizes) -> list[Cell]:
    """The device's limits, and what `deterministic: true` costs, as far as they were measured."""
    by_name = {each.name: each for each in found}
    limits = []
    if copy := by_name.get("ceiling: copy"):
        limits.append(Cell("Kernels", "copy, TB/s", "measured", copy.gigabytes_per_s / 1000))
    if product := by_name.get("ceiling: product"):
        what = f"product of {sizes.square:,} squared, TFLOPS"
        limits.append(Cell("Kernels", what, "measured", product.teraflops, "{:,.0f}"))
    for rows in (1, sizes.chunk):
        fixed, torchs = (by_name.get(f"{name} product, {rows} rows") for name in ("fixed order", "torch's"))
        if fixed and torchs:
            what = f"deterministic products / torch's, time, {rows} row{'' if rows == 1 else 's'}"
            limits.append(Cell("Kernels", what, "measured", fixed.seconds / torchs.seconds, "{:.1f}"))
    return limits


def measure(shape: Shape, sizes: Sizes, device: torch.device) -> Iterator[Measurement]:
    """Ceilings first, then every kernel, in bfloat16."""
    for timed in (*ceilings(sizes, device), *kernels(shape, sizes, device)):
        seconds = seconds_of(timed.run, device)
        yield Measurement(timed.name, seconds, timed.num_bytes / seconds / 1e9, timed.num_operations / seconds / 1e12)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The median of a call's times on a GPU; a single one on a CPU, where it only shows that the call works."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, return_mode="median")) / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def table_rows(found: list[Measurement]) -> list[list[str]]:
    return [
        [each.name, f"{each.seconds * 1e6:.1f}", f"{each.gigabytes_per_s:.0f}", f"{each.teraflops:.1f}"]
        for each in found
    ]


def ceilings(sizes: Sizes, device: torch.device) -> Iterator[Timed]:
    """The device's limits, measured with torch's own operations."""
    source, target = torch.ones(2, sizes.copy, dtype=torch.bfloat16, device=device)
    yield Timed("ceiling: copy", lambda: target.copy_(source), 2 * source.nbytes)
    square = torch.randn(sizes.square, sizes.square, device=device).bfloat16()
    yield Timed("ceiling: product", lambda: square @ square, 3 * square.nbytes, 2 * sizes.square**3)


def kernels(shape: Shape, sizes: Sizes, device: torch.device) -> Iterator[Timed]:
    yield from _products(shape, sizes, device)
    yield from _attention(shape, sizes, device)
    yield from _layers(shape, sizes, device)
    yield from _choices(sizes, device)
    yield _compaction(shape, sizes, device)


def _products(shape: Shape, sizes: Sizes, device: torch.device) -> Iterator[Timed]:
    """Gate and up of a layer: of few rows, torch's, and those of `deterministic: true`."""
    weight = torch.randn(2 * shape.ffn, shape.hidden, device=device).bfloat16()
    fixed, few = TiledMatrix(weight), GpuMatrix(weight)
    x = torch.randn(1, shape.hidden, device=device).bfloat16()
    yield Timed("product of few rows, 1 row", partial(few, x), weight.nbytes, 2 * weight.numel())
    for rows in (1, sizes.batch, sizes.chunk):
        x = torch.randn(rows, shape.hidden, device=device).bfloat16()
        num_bytes = weight.nbytes + x.nbytes + rows * len(weight) * x.itemsize
        operations = 2 * rows * weight.numel()
        yield Timed(f"torch's product, {rows} rows", partial(linear, x, weight), num_bytes, operations)
        yield Timed(f"fixed order product, {rows} rows", partial(fixed, x), num_bytes, operations)


def _attention(shape: Shape, sizes: Sizes, device: torch.device) -> Iterator[Timed]:
    """Requests of one batch read the same KV slots, so the cache helps them more than it would."""
    tokens, end, chunk = Tokens(shape, sizes.context, torch.bfloat16, device), sizes.context, sizes.chunk
    for rows in (1, sizes.batch):
        attend, q = tokens.planned(end - 1, end, rows)
        yield _attended(f"attention, {rows} decoding over {end}", attend, q, rows * tokens.kv.nbytes, rows * end)
    attend, q = tokens.planned(end - chunk, end)
    pairs = chunk * end - chunk**2 // 2
    yield _attended(f"attention, chunk of {chunk} up to {end}", attend, q, tokens.kv.nbytes, pairs)


def _attended(name: str, attend: TritonAttend, q: Tensor, num_bytes: int, pairs: int) -> Timed:
    """`pairs` of a query and a key."""
    return Timed(name, lambda: attend.read(0, q), num_bytes, 4 * pairs * q.shape[1] * q.shape[2])


def _layers(shape: Shape, sizes: Sizes, device: torch.device) -> Iterator[Timed]:
    rows, weight = sizes.batch, torch.ones(shape.hidden, device=device).bfloat16()
    x, residual = torch.randn(2, rows, shape.hidden, device=device).bfloat16()
    yield Timed(f"add, norm, {rows} rows", lambda: layers.add_rms_norm(x, residual, weight, EPS), 4 * x.nbytes)
    name = f"add, norm, {rows} rows, two launches"
    yield Timed(name, lambda: layers.rms_norm(x.add_(residual), weight, EPS), 5 * x.nbytes)
    gate_up = torch.randn(rows, 2 * shape.ffn, device=device).bfloat16()
    yield Timed(f"gated units, {rows} rows", lambda: layers.silu_and_mul(gate_up), 3 * gate_up.nbytes // 2)
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.dim
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=device).bfloat16()
    cos, sin = torch.ones(2, rows, 1, dim, device=device)
    pool = torch.zeros(rows, 2, kv_heads, dim, device=device).bfloat16()
    slots = torch.arange(rows, device=device)
    yield Timed(
        f"rotary positions, KV, {rows} rows",
        lambda: layers.rotate_and_store(qkv, cos, sin, None, EPS, pool, slots),
        2 * qkv.nbytes + cos.nbytes + sin.nbytes,
    )


def _choices(sizes: Sizes, device: torch.device) -> Iterator[Timed]:
    sampled = SamplingOptions(7, 0.8, 1.0, 0, 0.0, 0.0, 0.0, 1.0, [], 0, [], None)
    for rows in (1, sizes.batch):
        logits = torch.randn(rows, sizes.vocab, device=device).mul_(3).bfloat16()
        for name, options in (("greedy", None), ("sampled", sampled), ("top-p", sampled._replace(top_p=0.9))):
            yield _choice(f"choice, {name}, {rows} of {sizes.vocab}", logits, options)
            yield _choice(f"choice, {name}, {rows} of {sizes.vocab} in float32", logits.float(), options)


def _choice(name: str, logits: Tensor, options: SamplingOptions | None) -> Timed:
    rows = sampling.Rows(logits)
    if options is None:
        return Timed(name, lambda: sampling.choose(rows, None, None), logits.nbytes)
    batch = SamplingBatch.of([SamplingState(options)] * len(logits), logits.device)
    keys = noise_keys(batch.seeds, torch.arange(len(logits), device=logits.device))
    return Timed(name, lambda: sampling.choose(rows, batch, keys), logits.nbytes)


def _compaction(shape: Shape, sizes: Sizes, device: torch.device) -> Timed:
    """Paths of four nodes, of which three move, in the 32 layers of 8B models."""
    num_layers, depth, width = 32, 4, 8
    pool = torch.zeros(num_layers, sizes.batch * width, 2, shape.num_kv_heads, shape.dim, device=device).bfloat16()
    slots = torch.arange(sizes.batch * width, device=device).view(sizes.batch, width)
    nodes = torch.tensor([0, 2, 4, 6], device=device).repeat(sizes.batch, 1)
    counts = torch.full((sizes.batch,), depth, device=device)
    moved = 2 * num_layers * sizes.batch * (depth - 1) * pool[0, 0].nbytes
    outcome = VerifyOutput.of(counts, nodes, nodes).outcome
    return Timed(f"compaction, {sizes.batch} paths", lambda: kv.commit_paths(pool, slots, outcome), moved)
