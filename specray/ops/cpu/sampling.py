"""Sampling with the CPU kernels: of rows, with masks of a grammar, and at the nodes of draft trees (verification)."""

import ctypes

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.processor import num_threads
from specray.ops.cpu.structs import DraftTreesStruct, pointer
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


def forbid(kernels: Kernels, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `TokenMask`; float32 `logits` [m, V], int64 `rows` [n], int32 `bits` [n, words]."""
    rows, bits = rows.contiguous(), bits.contiguous()
    threads = min(len(rows), num_threads(logits.shape[1] * len(rows) * logits.itemsize))
    kernels.forbid(pointer(logits), logits.shape[1], pointer(rows), pointer(bits), bits.shape[1], len(rows), threads)


def walk(
    kernels: Kernels,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_depth: int,
    batch: SamplingBatch,
    lengths: Tensor,
) -> Tensor:
    """Walk B draft trees, sampling tokens at the nodes on the way only.

    `logits` float32 [sum of num_nodes, V], `tokens` and `parents` int64 [B, N], `num_nodes` and `lengths` int64 [B].
    Returns the outcome, int64 [B, 2 + 2 * (max_depth + 1)]; see VerifyOutput.
    """
    count, width = tokens.shape
    inputs = [part.contiguous() for part in (tokens, parents, num_nodes, logits)]
    options: list[Tensor | None] = [None] * 6
    if any(state.is_sampled for state in batch.states):
        columns = (lengths, batch.seeds, batch.temperature, batch.top_p, batch.min_p, batch.top_k)
        options = [column.contiguous() for column in columns]
    trees = DraftTreesStruct(
        count, width, max_depth, logits.shape[1], *map(pointer, inputs), None, *map(pointer, options)
    )
    return _walked(kernels, trees, min(count, num_threads()))


def walk_chosen(
    kernels: Kernels, choices: Tensor, tokens: Tensor, parents: Tensor, num_nodes: Tensor, max_depth: int
) -> Tensor:
    """Walk draft trees with known tokens after all nodes: `choices` int64 [sum of num_nodes], -1 if not finite."""
    count, width = tokens.shape
    inputs = [part.contiguous() for part in (tokens, parents, num_nodes)]
    trees = DraftTreesStruct(count, width, max_depth, 0, *[part.data_ptr() for part in inputs], None, pointer(choices))
    return _walked(kernels, trees, 1)


def _walked(kernels: Kernels, trees: DraftTreesStruct, num_threads: int) -> Tensor:
    outcome = torch.empty(trees.num_trees, 2 + 2 * (trees.max_depth + 1), dtype=torch.int64)
    kernels.walk(ctypes.byref(trees), outcome.data_ptr(), num_threads)
    return outcome
