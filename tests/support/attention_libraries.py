"""Models of flashinfer's and flash-attention's documented calls, in float64 on a CPU.

They bind every call to the recorded signatures of the packages, read the index and mask arrays as the documentation
describes them, and compute one request at a time. They also have what only the sources say: flashinfer's `plan` counts
the offsets of a packed mask in bits where its kernels count bytes, and a wrapper keeps the type it was planned for.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.signatures import signature

_WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


def _bound(distribution: str, name: str, *args: Any, **kwargs: Any) -> SimpleNamespace:
    """The arguments by name. TypeError if the function does not take them."""
    return SimpleNamespace(**signature(distribution, name).bind(*args, **kwargs).arguments)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        call = _bound("flashinfer-python", f"{_WRAPPER}.__init__", self, *args, **kwargs)
        assert call.kv_layout == "NHD"
        assert call.backend in ("auto", "fa2")
        self._backend = call.backend

    def plan(self, *args: Any, **kwargs: Any) -> None:
        call = _bound("flashinfer-python", f"{_WRAPPER}.plan", self, *args, **kwargs)
        arrays = (call.qo_indptr, call.paged_kv_indptr, call.paged_kv_indices, call.paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 for array in arrays)
        assert call.qo_indptr.device.type == "cpu", "the scheduler reads it on the host"
        self._call = call
        self._queries, self._pages = call.qo_indptr.tolist(), call.paged_kv_indptr.tolist()
        self._custom_mask_buf = call.packed_custom_mask
        assert self._custom_mask_buf is None or self._backend == "fa2", "other kernels have no masks"
        lens = [(self._queries[r + 1] - self._queries[r]) * self._kv_len(r) for r in range(len(self._queries) - 1)]
        self._mask_indptr_buf = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0)  # in bits

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        call = _bound("flashinfer-python", f"{_WRAPPER}.run", self, *args, **kwargs)
        keys, values = call.paged_kv_cache
        assert call.q.dtype == self._call.q_data_type
        assert keys.dtype == values.dtype == self._call.kv_data_type
        assert keys.shape[1:] == (self._call.page_size, self._call.num_kv_heads, self._call.head_dim_qk)
        assert len(call.q) == self._queries[-1]
        out = torch.empty_like(call.q)
        for request in range(len(self._queries) - 1):
            queries = slice(self._queries[request], self._queries[request + 1])
            pages = self._call.paged_kv_indices[self._pages[request] : self._pages[request + 1]].long()
            k, v = (cache[pages].flatten(0, 1)[: self._kv_len(request)] for cache in (keys, values))
            sees = self._sees(request, queries.stop - queries.start, len(k))
            out[queries] = _attend(call.q[queries], k, v, sees, self._call.sm_scale, self._call.logits_soft_cap)
        return out

    def _kv_len(self, request: int) -> int:
        num_pages = self._pages[request + 1] - self._pages[request]
        last = int(self._call.paged_kv_last_page_len[request])
        assert 1 <= last <= self._call.page_size
        return (num_pages - 1) * self._call.page_size + last

    def _sees(self, request: int, num_queries: int, num_keys: int) -> Tensor:
        query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)
        if self._custom_mask_buf is not None:
            bit = query * num_keys + key
            place = int(self._mask_indptr_buf[request]) + bit // 8
            sees = (self._custom_mask_buf.long()[place.clamp(max=len(self._custom_mask_buf) - 1)] >> bit % 8 & 1) > 0
        else:
            sees = key <= num_keys - num_queries + query if self._call.causal else torch.ones(num_queries, num_keys) > 0
        window = self._call.window_left
        return sees & (key + num_queries + window >= num_keys + query) if window >= 0 else sees


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Tensor:
    call = _bound("vllm", "flash_attn_varlen_func", *args, **kwargs)
    assert call.cu_seqlens_q.dtype == call.seqused_k.dtype == call.block_table.dtype == torch.int32
    assert call.causal
    assert call.fa_version in (2, 3)
    starts, lens = call.cu_seqlens_q.tolist(), call.seqused_k.tolist()
    queries = [starts[r + 1] - starts[r] for r in range(len(lens))]
    assert (call.max_seqlen_q, call.max_seqlen_k) == (max(queries), max(lens))
    page, out = call.k.shape[1], torch.empty_like(call.q)
    for request, (num_queries, num_keys) in enumerate(zip(queries, lens, strict=True)):
        blocks = call.block_table[request, : -(-num_keys // page)].long()
        k, v = (cache[blocks].flatten(0, 1)[:num_keys] for cache in (call.k, call.v))
        place = num_keys - num_queries + torch.arange(num_queries)[:, None]  # aligned to the last key
        left, right = call.window_size
        key = torch.arange(num_keys)
        sees = (key <= place) & ((key >= place - left) | (left < 0)) & ((key <= place + right) | (right < 0))
        own = slice(starts[request], starts[request + 1])
        out[own] = _attend(call.q[own], k, v, sees, call.softmax_scale, call.softcap)
    return out


def is_fa_version_supported(*args: Any, **kwargs: Any) -> bool:
    return bool(_bound("vllm", "is_fa_version_supported", *args, **kwargs).fa_version == 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[Q, heads, dim]"""
    fold = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(fold, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    probs = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype)
