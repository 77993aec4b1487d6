"""The KV pool of one rank, and the compaction of accepted paths."""

import torch
from torch import Tensor

from specray.ops.attention import make_pool, move_kv
from specray.ops.cpu.attention import commit_paths
from specray.ops.cpu.library import kernels_on
from specray.ops.gpu import uses_triton
from specray.ops.outcome import nodes as nodes_of
from specray.ops.outcome import num_kept


class KVCache:
    """Pool [layers, KV slots, 2, kv_heads, dim] of `num_blocks` blocks, and one that takes the writes of padding.

    Block 0 stays zero and is read as padding.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.padding_slot = num_blocks * page_size
        self.pool = make_pool(num_layers, self.padding_slot + page_size, num_kv_heads, head_dim, dtype, device)
        self._kernels = kernels_on(device)
        self._uses_triton = uses_triton(device)

    def commit(self, kv_slots: Tensor, outcome: Tensor) -> None:
        """Move the KV of accepted paths behind their prefixes.

        `kv_slots` int64 [B, N] are the KV slots of the trees' nodes as they were written, `outcome` is that of
        StepOutput. The kept node n at depth d moves to the KV slot of node d.
        """
        if self._kernels is not None:
            commit_paths(self._kernels, self.pool, kv_slots, outcome)
            return
        if self._uses_triton:
            from specray.ops.gpu import kv

            kv.commit_paths(self.pool, kv_slots, outcome)
            return
        num_tokens, nodes = num_kept(outcome), nodes_of(outcome)
        depths = torch.arange(1, nodes.shape[1], device=nodes.device)
        is_moved = (depths < num_tokens[:, None]) & (nodes[:, 1:] != depths)
        # Where nothing moves, KV slot 0 (zeros) is copied to itself, so that no shape depends on the outcome.
        source = torch.where(is_moved, kv_slots.gather(1, nodes[:, 1:]), 0)
        target = torch.where(is_moved, kv_slots[:, 1 : nodes.shape[1]], 0)
        move_kv(self.pool, source.flatten(), target.flatten())
