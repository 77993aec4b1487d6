"""flashinfer's paged prefill kernels, for prompt chunks, decoding and draft trees.

Facts of flashinfer-python 0.7 that this code depends on; a test binds its calls to that version's signatures:

- Pages may be strided and of one KV slot, so no request's KV has to be contiguous. Draft rows have holes.
- A wrapper that was given a mask always applies it, and chooses the FlashAttention-2 kernels. So there is a wrapper for
  trees and others for everything else.
- On Hopper it chooses FlashAttention-3's kernels, whose tiles have 128 queries and which do not split the keys among
  programs. They are the fastest for prompt chunks, and take up to 4 times as long as FlashAttention-2's for decoding.
- `plan` takes a packed mask but computes its offsets in bits, where the kernels count bytes: all requests but the first
  would read another's mask. The offsets are replaced after each plan.
- `plan` copies from a pinned buffer that it fills anew each time, so the last copy must be done by then.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch
from specray.ops.gpu.page_index import packed_mask, slot_pages
from specray.ops.gpu.routed_attention import Read

HEAD_DIMS = (64, 128, 256)  # that the kernels are compiled for
FEW_QUERIES = 16  # of a request: up to so many are FlashAttention-2's
_WORKSPACE_BYTES = 128 << 20  # as its documentation advises


class FlashInferReader:
    """Plans batches over `pool` [layers, slots, 2, kv_heads, dim]; `library` is the module flashinfer.

    Only the latest plan can be read. `masks_trees`: every request of a batch has a tree; otherwise none has.
    `kernels` are flashinfer's "auto" or "fa2"; trees have "fa2".
    """

    def __init__(self, library: Any, pool: Tensor, num_heads: int, masks_trees: bool, kernels: str = "fa2") -> None:
        _, _, _, self._num_kv_heads, self._head_dim = pool.shape
        self._num_heads, self._dtype = num_heads, pool.dtype
        self._masks_trees = masks_trees
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(pool.device), kv_layout="NHD", backend=kernels
        )
        self._copied = torch.Event(pool.device) if pool.device.type == "cuda" else None
        self._num_plans = 0

    def plan(self, batch: AttentionBatch) -> Read:
        pages = slot_pages(batch)
        mask = packed_mask(batch) if self._masks_trees else None
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(
            pages.query_starts,
            pages.kv_starts,
            pages.slots,
            pages.last_page_lens,
            num_qo_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim_qk=self._head_dim,
            page_size=1,
            packed_custom_mask=None if mask is None else mask.bits,
            causal=mask is None,
            sm_scale=self._head_dim**-0.5,
            window_left=-1 if batch.window is None else batch.window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        if mask is not None:
            self._wrapper._mask_indptr_buf = mask.starts  # in bytes
        if self._copied is not None:
            self._copied.record()
        self._num_plans = number = self._num_plans + 1

        def read(layer_pool: Tensor, q: Tensor) -> Tensor:
            assert number == self._num_plans, "another batch was planned since"
            out: Tensor = self._wrapper.run(q, (layer_pool[:, None, 0], layer_pool[:, None, 1]))
            return out.flatten(1)

        return read


@lru_cache
def _workspace(device: torch.device) -> Tensor:
    """One for all wrappers of a device, which run one after the other."""
    return torch.zeros(_WORKSPACE_BYTES if device.type == "cuda" else 16, dtype=torch.uint8, device=device)
