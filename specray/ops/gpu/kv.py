"""The KV pool on a GPU: compaction of accepted paths, in one launch for all layers."""

import triton
from torch import Tensor

from specray.ops.attention import as_bytes
from specray.ops.gpu.tree_kernels import compact_path
from specray.ops.step_tensors import nodes_of, num_kept

_BLOCK = 2048  # numbers of a program


def commit_paths(pool: Tensor, kv_slots: Tensor, outcome: Tensor) -> None:
    """See `KVCache.commit`; `pool` [layers, slots, 2, kv_heads, dim] is contiguous, a path ascends from the root."""
    pool, num_tokens, nodes = as_bytes(pool), num_kept(outcome), nodes_of(outcome)
    num_layers, num_slots, size = len(pool), pool.shape[1], pool[0, 0].numel()
    block = min(_BLOCK, triton.next_power_of_2(size))
    if len(nodes):
        assert kv_slots.stride(1) == 1
        compact_path[(len(nodes), num_layers, triton.cdiv(size, block))](
            pool,
            kv_slots,
            nodes,
            num_tokens,
            num_slots,
            kv_slots.stride(0),
            nodes.stride(0),
            num_tokens.stride(0),
            SIZE=size,
            BLOCK=block,
        )
