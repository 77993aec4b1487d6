"""Verification of draft trees by one call of the CPU kernels."""

import ctypes

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import DraftTreesStruct
from specray.ops.cpu.threads import num_threads
from specray.ops.sampling_state import SamplingBatch


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
    kept = [part.contiguous() for part in (tokens, parents, num_nodes, logits)]
    options: list[Tensor | None] = [None] * 6
    if any(state.is_sampled for state in batch.states):
        columns = (lengths, batch.seeds, batch.temperature, batch.top_p, batch.min_p, batch.top_k)
        options = [column.contiguous() for column in columns]
    trees = DraftTreesStruct(
        count, width, max_depth, logits.shape[1], *map(pointer, kept), None, *map(pointer, options)
    )
    return _walked(kernels, trees, min(count, num_threads()))


def walk_chosen(
    kernels: Kernels, choices: Tensor, tokens: Tensor, parents: Tensor, num_nodes: Tensor, max_depth: int
) -> Tensor:
    """Walk draft trees with known tokens after all nodes: `choices` int64 [sum of num_nodes], -1 if not finite."""
    count, width = tokens.shape
    kept = [part.contiguous() for part in (tokens, parents, num_nodes)]
    trees = DraftTreesStruct(count, width, max_depth, 0, *[part.data_ptr() for part in kept], None, pointer(choices))
    return _walked(kernels, trees, 1)


def _walked(kernels: Kernels, trees: DraftTreesStruct, num_threads: int) -> Tensor:
    outcome = torch.empty(trees.num_trees, 2 + 2 * (trees.max_depth + 1), dtype=torch.int64)
    kernels.walk(ctypes.byref(trees), outcome.data_ptr(), num_threads)
    return outcome
