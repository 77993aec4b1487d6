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

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch
from specray.ops.gpu.page_index import packed_mask, slot_pages
from specray.ops.gpu.routed_attention import Read
from specray.ops.layer_attention import LayerAttention

HEAD_DIMS = (64, 128, 256)  # that the kernels are compiled for
FEW_QUERIES = 16  # of a request: up to so many are FlashAttention-2's
_WORKSPACE_BYTES = 128 << 20  # as its documentation advises


class FlashInferReader:
    """Plans batches over `pools` [slots, 2, kv_heads, dim], for those layers that attend like `layer`, without sinks.

    `library` is the module flashinfer. Only the latest plan can be read. `masks_trees`: every request of a batch has a
    tree; otherwise none has.
    `kernels` are flashinfer's "auto" or "fa2"; trees have "fa2".
    """

    def __init__(
        self,
        library: Any,
        layer: LayerAttention,
        pools: Sequence[Tensor],
        masks_trees: bool,
        kernels: str = "fa2",
    ) -> None:
        self._layer, self._pools, self._dtype = layer, pools, pools[0].dtype
        self._masks_trees = masks_trees
        device = pools[0].device
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(device), kv_layout="NHD", backend=kernels
        )
        self._copied = torch.Event(device) if device.type == "cuda" else None
        self._num_plans = 0

    def plan(self, batch: AttentionBatch) -> Read:
        pages, layer = slot_pages(batch), self._layer
        mask = packed_mask(batch) if self._masks_trees else None
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(
            pages.query_starts,
            pages.kv_starts,
            pages.slots,
            pages.last_page_lens,
            num_qo_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim_qk=layer.head_dim,
            page_size=1,
            packed_custom_mask=None if mask is None else mask.bits,
            causal=mask is None,
            sm_scale=layer.head_dim**-0.5 if layer.scale is None else layer.scale,
            window_left=-1 if layer.window is None else layer.window - 1,
            logits_soft_cap=layer.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        if mask is not None:
            self._wrapper._mask_indptr_buf = mask.starts  # in bytes
        if self._copied is not None:
            self._copied.record()
        self._num_plans = number = self._num_plans + 1

        def read(layer: int, q: Tensor) -> Tensor:
            assert number == self._num_plans, "another batch was planned since"
            pool = self._pools[layer]
            out: Tensor = self._wrapper.run(q, (pool[:, None, 0], pool[:, None, 1]))
            return out.flatten(1)

        return read


@lru_cache
def _workspace(device: torch.device) -> Tensor:
    """One for all wrappers of a device, which run one after the other."""
    return torch.zeros(_WORKSPACE_BYTES if device.type == "cuda" else 16, dtype=torch.uint8, device=device)
