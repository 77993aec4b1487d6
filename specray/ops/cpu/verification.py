"""Verification of draft trees as a part of the forward pass that computes their logits, by the CPU kernels."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu import structs
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.structs import pointer
from specray.ops.sampling_state import SamplingBatch


class VerifiedTrees(NamedTuple):
    """The trees of B requests that a pass verifies; the tensors are those of DraftTree."""

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    max_depth: int


class Verification:
    """What a pass verifies of requests whose known tokens it computes all, so that each samples.

    Once the pass has ended, `outcome` int64 [B, 2 + 2 * (max_depth + 1)] is that of StepOutput, and the accepted paths
    are committed: their KV in the pool, their tokens in the request table.
    """

    def __init__(
        self, table: TableKernels, pool: Tensor, slots: Tensor, sampling: Sequence[Tensor], trees: VerifiedTrees
    ) -> None:
        """`slots` int64 [B] are those of the table. `pool` is the target's, [layers, slots, 2, kv_heads, dim].

        `sampling` are the requests' seeds, temperature, top-p, min-p and top-k, [B] each, or nothing if all are greedy.
        """
        tokens, parents, num_nodes, max_depth = trees
        count, width = tokens.shape
        self.outcome = torch.empty(count, 2 + 2 * (max_depth + 1), dtype=torch.int64)
        self._keep_alive = table, pool, slots, sampling, trees  # the struct has the addresses of all of these
        walked = structs.DraftTreesStruct(count, width, max_depth, 0, *map(pointer, (tokens, parents, num_nodes)))
        if sampling:
            addresses = map(pointer, sampling)
            walked.seeds, walked.temperature, walked.top_p, walked.min_p, walked.top_k = addresses
        layer_bytes, slot_bytes = (stride * pool.itemsize for stride in pool.stride()[:2])
        sizes = (pool.data_ptr(), pool.shape[0], layer_bytes, slot_bytes)
        self.struct = structs.VerificationStruct(walked, table.struct, pointer(slots), *sizes, pointer(self.outcome))

    @classmethod
    def of(
        cls, table: TableKernels, pool: Tensor, slots: Tensor, sampling: SamplingBatch, trees: VerifiedTrees
    ) -> "Verification":
        """A verification with the options of a batch, from tensors of any strides."""
        options: list[Tensor] = []
        if any(state.is_sampled for state in sampling.states):
            columns = (sampling.seeds, sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k)
            options = [column.contiguous() for column in columns]
        tokens, parents, num_nodes, max_depth = trees
        parts = (tokens.contiguous(), parents.contiguous(), num_nodes.contiguous())
        return cls(table, pool, slots.contiguous(), options, VerifiedTrees(*parts, max_depth))

    def address(self, vocab_size: int) -> "ctypes._Pointer[structs.VerificationStruct]":
        """The struct's address, for logits of `vocab_size` columns."""
        self.struct.trees.vocab_size = vocab_size
        return ctypes.pointer(self.struct)
