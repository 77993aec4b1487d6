"""The KV pool of one rank, and the compaction of accepted paths."""

import torch
from torch import Tensor

from specray.ops.attention import make_pool
from specray.ops.device_ops import ops_on


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
        self._ops = ops_on(device)

    def commit(self, kv_slots: Tensor, outcome: Tensor) -> None:
        """Move the KV of accepted paths behind their prefixes.

        `kv_slots` int64 [B, N] are the KV slots of the trees' nodes as they were written, `outcome` is that of
        StepOutput. The kept node n at depth d moves to the KV slot of node d.
        """
        self._ops.commit_paths(self.pool, kv_slots, outcome)
