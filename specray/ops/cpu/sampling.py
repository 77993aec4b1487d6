"""Sampling with the CPU kernels: row by row, and along the path of each draft tree; masks of a grammar."""

import ctypes

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import DraftTrees
from specray.ops.cpu.threads import num_threads
from specray.ops.sampling_state import SamplingBatch


def sample(kernels: Kernels, logits: Tensor, batch: SamplingBatch | None = None, keys: Tensor | None = None) -> Tensor:
    """The next token of each row of float32 `logits` [n, V], int64 [n]; see `specray.ops.sampling`.

    `keys` int32 [n, 2] are the rows' noise. Without options and keys it is the largest logit.
    """
    count, size = logits.shape
    logits, tokens = logits.contiguous(), torch.empty(count, dtype=torch.int64)
    options: list[Tensor | None] = [None] * 5
    if batch is not None and keys is not None:
        columns = (keys, batch.temperature, batch.top_p, batch.min_p, batch.top_k)
        options = [column.contiguous() for column in columns]
    threads = min(count, num_threads())
    kernels.sample(pointer(logits), count, size, *map(pointer, options), pointer(tokens), threads)
    return tokens


def walk(
    kernels: Kernels,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_depth: int,
    batch: SamplingBatch,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk B draft trees, sampling tokens at the nodes on the way only.

    `logits` float32 [sum of num_nodes, V], `tokens` and `parents` int64 [B, N], `num_nodes` and `lengths` int64 [B].
    Returns num_tokens [B], tokens and nodes [B, max_depth + 1], as in VerifyOutput.
    """
    count, width = tokens.shape
    starts = num_nodes.cumsum(0) - num_nodes
    kept = [part.contiguous() for part in (tokens, parents, num_nodes, starts, logits)]
    options: list[Tensor | None] = [None] * 6
    if any(state.is_sampled for state in batch.states):
        columns = (lengths, batch.seeds, batch.temperature, batch.top_p, batch.min_p, batch.top_k)
        options = [column.contiguous() for column in columns]
    trees = DraftTrees(count, width, max_depth, logits.shape[1], *map(pointer, kept), *map(pointer, options))
    num_tokens = torch.empty(count, dtype=torch.int64)
    sampled, nodes = torch.empty(2, count, max_depth + 1, dtype=torch.int64)
    threads = min(count, num_threads())
    kernels.walk(ctypes.byref(trees), pointer(num_tokens), pointer(sampled), pointer(nodes), threads)
    return num_tokens, sampled, nodes


def forbid(kernels: Kernels, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `specray.ops.token_mask`; float32 `logits` [m, V], int64 `rows` [n], int32 `bits` [n, words]."""
    rows, bits = rows.contiguous(), bits.contiguous()
    threads = min(len(rows), num_threads(logits.shape[1] * len(rows) * logits.itemsize))
    kernels.forbid(pointer(logits), logits.shape[1], pointer(rows), pointer(bits), bits.shape[1], len(rows), threads)
