"""Inputs for the GPU kernels, each with a reference in float64."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specray.layers.moe import Expert, ExpertList
from specray.ops.attention import AttentionBatch
from specray.ops.filters import scores
from specray.ops.gpu import kv, layers, sampling
from specray.ops.gpu.attention import TritonAttend, TritonAttention
from specray.ops.gpu.experts import GroupedExperts
from specray.ops.gpu.few_rows import GpuMatrix
from specray.ops.gpu.matrix import TiledMatrix
from specray.ops.noise import gumbel, noise_keys
from specray.ops.sampling_state import SamplingBatch, SamplingState
from specray.ops.step_tensors import Choices
from specray.spec_decode.verify_batch import VerifyOutput
from specray.step import SamplingOptions

EPS = 1e-5


class Case(NamedTuple):
    """One call. `run` returns what the kernel computed and what it should be, in float64."""

    name: str
    run: Callable[[], tuple[Tensor, Tensor]]


class Shape(NamedTuple):
    """Sizes of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    dim: int
    hidden: int
    ffn: int


SHAPES = [
    Shape("Llama 8B", 32, 8, 128, 4096, 14336),
    Shape("Qwen2.5 7B", 28, 4, 128, 3584, 18944),
    Shape("SmolLM2", 9, 3, 64, 576, 1536),
]
TINY = Shape("tiny", 6, 2, 16, 48, 80)  # for a test without a GPU


class Tokens:
    """Tokens at positions 0 … of one request, each with a query, a key and a value, in scattered KV slots."""

    def __init__(self, shape: Shape, count: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(count)
        self.shape, self.count = shape, count
        self.q = torch.randn(count, shape.num_heads, shape.dim, device=device).to(dtype)
        self.kv = torch.randn(count, 2, shape.num_kv_heads, shape.dim, device=device).to(dtype)
        self.slots = 16 + torch.randperm(count + 64, device=device)[:count]
        self.pool = torch.zeros(1, count + 80, 2, shape.num_kv_heads, shape.dim, dtype=dtype, device=device)
        self.pool[0, self.slots] = self.kv

    def attend(self, begin: int, end: int, batch_size: int = 1, splits: bool | None = None) -> Tensor:
        """Queries `begin` … `end` - 1, in a batch with `batch_size` equal requests; the result of the first one."""
        attend, q = self.planned(begin, end, batch_size, splits)
        return attend(0, q, self.kv[begin:end].repeat(batch_size, 1, 1, 1))[: end - begin]

    def planned(
        self, begin: int, end: int, batch_size: int = 1, splits: bool | None = None
    ) -> tuple[TritonAttend, Tensor]:
        """The attention of these queries, and the queries of all requests."""
        queries, rows = end - begin, batch_size
        batch = AttentionBatch(
            [queries] * rows,
            [end] * rows,
            self.slots[:end].repeat(rows, 1),
            self.slots[begin:end].repeat(rows),
            [(0, 0)] * rows,
        )
        backend = TritonAttention(self.pool, self.shape.num_heads)
        if splits is not None:
            backend.enough_programs = 1 << 30 if splits else 0
        return backend.plan(batch), self.q[begin:end].repeat(rows, 1, 1)

    def attend_path(self, begin: int) -> Tensor:
        """Tokens from `begin` on as the path of a tree, beside a sibling of each that must not be seen."""
        depth = self.count - begin
        order = torch.arange(depth, device=self.slots.device).repeat_interleave(2)[1:]  # root, then pairs of siblings
        nodes = len(order)
        mask = torch.zeros(nodes, nodes, dtype=torch.bool, device=self.slots.device)
        path = [0, *range(2, nodes, 2)]  # the second of each pair
        for node in range(nodes):
            level = int(order[node])
            mask[node, path[:level]] = True
            mask[node, node] = True
        own = torch.arange(nodes, device=self.slots.device)
        slots = torch.cat((self.slots[:begin], self.pool.shape[1] + own))
        pool = torch.cat((self.pool, self.pool.new_zeros(1, nodes, *self.pool.shape[2:])), 1)
        batch = AttentionBatch([nodes], [begin + nodes], slots[None], slots[begin:], [(nodes, nodes)], mask[None])
        q, kv = self.q[begin + order], self.kv[begin + order].clone()
        kv[1::2] = 50.0  # the siblings that are not on the path
        out = TritonAttention(pool, self.shape.num_heads).plan(batch)(0, q, kv)
        return out[path]

    def expected(self, begin: int, end: int) -> Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (part[:end].double().repeat_interleave(group, 1) for part in self.kv.unbind(1))
        scores = torch.einsum("qhd,khd->hqk", self.q[begin:end].double(), k) * self.shape.dim**-0.5
        position = torch.arange(end, device=k.device)
        scores.masked_fill_(position > position[begin:end, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def kernel_cases(shape: Shape, dtype: torch.dtype, device: torch.device, context: int) -> Iterator[Case]:
    """Every kernel once with a model's sizes."""
    tokens, last, half, path = Tokens(shape, context, dtype, device), context - 1, context // 2, context - 6
    yield Case("attention, decoding", lambda: (tokens.attend(last, context), tokens.expected(last, context)))
    yield Case("attention, chunk", lambda: (tokens.attend(half, context), tokens.expected(half, context)))
    yield Case("attention, tree", lambda: (tokens.attend_path(path), tokens.expected(path, context)))
    x, residual = torch.randn(2, 7, shape.hidden, device=device).to(dtype)
    weight = torch.rand(shape.hidden, device=device).to(dtype)
    total = (x + residual).double()
    yield Case("add, norm", lambda: (layers.add_rms_norm(x.clone(), residual, weight, EPS), _normed(total, weight)))
    gate_up = torch.randn(7, 2 * shape.ffn, device=device).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    yield Case("gated units", lambda: (layers.silu_and_mul(gate_up), gate * gate.sigmoid() * up))
    yield Case("rotary positions, KV", lambda: _rotated(shape, dtype, device))
    yield Case("experts", lambda: _experts(dtype, device))
    yield Case("product in a fixed order", lambda: _product(shape, dtype, device))
    yield Case("product of few rows, added", lambda: _few_rows(shape, dtype, device))
    yield Case("product of few rows, gated", lambda: _few_rows_gated(shape, dtype, device))
    yield Case("choice of tokens", lambda: _choice(dtype, device))
    yield Case("walk of trees", lambda: _walk(device))
    yield Case("compaction", lambda: _compaction(shape, dtype, device))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _rotated(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.dim
    qkv = torch.randn(5, heads + 2 * kv_heads, dim, device=device).to(dtype)
    cos, sin = torch.randn(2, 5, 1, dim, device=device)
    pool = torch.zeros(9, 2, kv_heads, dim, dtype=dtype, device=device)
    slots = torch.randperm(9, device=device)[:5]
    q, k, v = qkv.double().split_with_sizes((heads, kv_heads, kv_heads), 1)
    q, k = (part * cos + part.roll(dim // 2, -1) * sin for part in (q, k))
    layers.rotate_and_store(qkv, cos, sin, None, EPS, pool, slots)
    return torch.cat((qkv[:, :heads], pool[slots].flatten(1, 2)), 1), torch.cat((q, k, v), 1)


def _product(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(7, shape.hidden, device=device).to(dtype), torch.randn(70, shape.hidden, device=device)
    weight = (weight / shape.hidden**0.5).to(dtype)
    return TiledMatrix(weight)(x), x.double() @ weight.double().T


def _few_rows(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(7, shape.ffn, device=device).to(dtype), torch.randn(300, shape.ffn, device=device)
    weight, residual = (weight / shape.ffn**0.5).to(dtype), torch.randn(7, 300, device=device).to(dtype)
    return GpuMatrix(weight).added(x, residual), x.double() @ weight.double().T + residual.double()


def _few_rows_gated(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(8, shape.hidden, device=device).to(dtype), torch.randn(600, shape.hidden, device=device)
    weight = (weight / shape.hidden**0.5).to(dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    return GpuMatrix(weight).gated(x), gate * gate.sigmoid() * up


def _choice(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of sampled rows, half of which have filters, against torch's operations on float32 copies."""
    logits = (torch.randn(8, 1500, device=device) * 3).to(dtype)
    options = SamplingOptions(0, 0.8, 1.0, 0, 0.0, 0.0, 0.0, 1.0, [], 0, [], None)
    chosen = [options._replace(seed=row, top_p=0.9 if row % 2 else 1.0, top_k=40 * (row % 2)) for row in range(8)]
    batch = SamplingBatch.of([SamplingState(each) for each in chosen], device)
    keys = noise_keys(batch.seeds, torch.arange(8, device=device))
    expected = (scores(logits.float(), batch) + gumbel(keys, logits.shape[1])).argmax(-1)
    return sampling.sample(logits, batch, keys), expected.double()


def _walk(device: torch.device) -> tuple[Tensor, Tensor]:
    """The token after node n is n + 1. Nodes 0, 1, 3 are a path by that, and the token after node 3 ends it."""
    tokens = torch.tensor([[9, 1, 1, 2]], device=device)
    parents = torch.tensor([[-1, 0, 0, 1]], device=device)
    nodes = torch.arange(4, device=device)
    choices = Choices(nodes + 1, torch.ones_like(nodes, dtype=torch.int8), nodes.to(torch.int32))
    walked = sampling.walk_chosen(choices, tokens, parents, torch.tensor([4], device=device), 3)
    expected = torch.tensor([[3, 3, 1, 2, 4, 0, 0, 1, 3, 0]], device=device)
    return walked, expected.double()


def _compaction(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    pool = torch.randn(3, 40, 2, shape.num_kv_heads, shape.dim, device=device).to(dtype)
    slots, path = torch.randperm(40, device=device)[:12].view(1, 12), [0, 2, 3, 7, 11]
    expected = pool.double()
    expected[:, slots[0, : len(path)]] = pool[:, slots[0, path]].double()
    count, nodes = torch.tensor([len(path)], device=device), torch.tensor([path], device=device)
    kv.commit_paths(pool, slots, VerifyOutput.of(count, nodes, nodes).outcome)
    return pool, expected


def _experts(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    def weight(*size: int) -> Tensor:
        return (torch.randn(size, device=device) / 8).to(dtype)

    weights = [(weight(96, 64), weight(96, 64), weight(64, 96)) for _ in range(8)]
    x = torch.randn(33, 64, device=device).to(dtype)
    chosen, shares = torch.rand(33, 8, device=device).topk(2).indices, torch.rand(33, 2, device=device)
    reference = ExpertList([Expert(gate.float(), up.float(), down.float()) for gate, up, down in weights])
    return GroupedExperts(weights)(x, shares, chosen), reference(x.float(), shares, chosen).double()
