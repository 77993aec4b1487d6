"""vLLM's flash-attention, for prompt chunks and decoding over whole blocks of KV slots. Not run on a GPU yet.

The package is vllm, whose `vllm.vllm_flash_attn` holds the kernels for current torch. The package vllm-flash-attn ends
at 2.6.2, which is compiled for torch 2.4 and cannot be installed beside this engine.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from specray.ops.attention import AttentionBatch
from specray.ops.gpu.page_index import block_table
from specray.ops.gpu.routed_attention import Read
from specray.ops.layer_attention import LayerAttention

PAGE_MULTIPLE = 16  # of KV slots in a block, for the FlashAttention-2 kernels
LARGEST_HEAD_DIM = 256


class FlashAttentionReader:
    """Plans batches without trees over a pool of blocks of `page_size` KV slots, for `layers` without sinks.

    `library` is the module vllm.vllm_flash_attn. A block table needs `seqused_k`, the lengths.
    """

    def __init__(self, library: Any, page_size: int, layers: Sequence[LayerAttention], pools: Sequence[Tensor]) -> None:
        self._attend: Callable[..., Tensor] = library.flash_attn_varlen_func
        self._version = 3 if library.is_fa_version_supported(3) else 2
        self._page_size = page_size
        self._layers = layers
        self._blocks = [pool.view(-1, page_size, *pool.shape[1:]) for pool in pools]

    def plan(self, batch: AttentionBatch) -> Read:
        table = block_table(batch, self._page_size)
        longest_query, longest_kv = max(batch.query_lens), max(batch.kv_lens)

        def read(layer: int, q: Tensor) -> Tensor:
            how, blocks = self._layers[layer], self._blocks[layer]
            return self._attend(
                q,
                blocks[:, :, 0],
                blocks[:, :, 1],
                max_seqlen_q=longest_query,
                cu_seqlens_q=table.query_starts,
                max_seqlen_k=longest_kv,
                seqused_k=table.kv_lens,
                block_table=table.blocks,
                softmax_scale=q.shape[-1] ** -0.5 if how.scale is None else how.scale,
                causal=True,
                window_size=[-1, -1] if how.window is None else [how.window - 1, 0],
                softcap=how.softcap or 0.0,
                fa_version=self._version,
            ).flatten(1)

        return read
