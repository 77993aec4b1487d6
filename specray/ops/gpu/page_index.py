"""The index and mask arrays of flashinfer and flash-attention, made from an AttentionBatch.

Only lengths come from the host, which knows them. KV slots and masks stay on the device and are not read.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch


class SlotPages(NamedTuple):
    """flashinfer's page table with pages of one KV slot, so that the KV slots of a request may lie anywhere."""

    query_starts: Tensor  # int32 [R + 1], on the host
    kv_starts: Tensor  # int32 [R + 1], on the host
    slots: Tensor  # int32 [sum of kv_lens], request by request
    last_page_lens: Tensor  # int32 [R] of ones, on the host


class PackedMask(NamedTuple):
    """flashinfer's mask: a bit for each query and key, a byte's lowest bit first, and whole bytes for each request."""

    bits: Tensor  # uint8 [bytes]
    starts: Tensor  # int32 [R + 1]: the first byte of each request


class BlockTable(NamedTuple):
    """flash-attention's page table; all int32 on the device."""

    query_starts: Tensor  # [R + 1]
    kv_lens: Tensor  # [R]
    blocks: Tensor  # [R, blocks of the longest request]; undefined past a request's own


def slot_pages(batch: AttentionBatch) -> SlotPages:
    """The KV slots of all requests behind each other."""
    device, total = batch.kv_slots.device, sum(batch.kv_lens)
    starts = list(accumulate(batch.kv_lens, initial=0))
    lens, first = torch.tensor([batch.kv_lens, starts[:-1]], dtype=torch.int64).to(device, non_blocking=True)
    row = torch.repeat_interleave(torch.arange(len(lens), device=device), lens, output_size=total)
    place = torch.arange(total, device=device) - first.index_select(0, row)
    return SlotPages(
        _int32(list(accumulate(batch.query_lens, initial=0))),
        _int32(starts),
        batch.kv_slots[row, place].to(torch.int32),
        torch.ones(len(batch.kv_lens), dtype=torch.int32),
    )


def packed_mask(batch: AttentionBatch) -> PackedMask:
    """Which keys each query attends to, in a layer without a window.

    All keys but the last ones are visible, so the mask starts as ones, and the bits of hidden keys are subtracted.
    """
    assert batch.tree_mask is not None
    device = batch.kv_slots.device
    sizes = [-(-queries * keys // 8) for queries, keys in zip(batch.query_lens, batch.kv_lens, strict=True)]
    starts = list(accumulate(sizes, initial=0))
    columns = [batch.query_lens, batch.kv_lens, *zip(*batch.tree_sizes, strict=True), starts[:-1]]
    packed = torch.tensor(columns, dtype=torch.int64).to(device, non_blocking=True)
    query_len, kv_len, num_nodes, num_tree_keys, first = packed[:, :, None, None]
    query = torch.arange(max(batch.query_lens), device=device)[:, None]
    # The last keys of a request: others come before every query.
    width = max(*batch.query_lens, *(keys for _, keys in batch.tree_sizes))
    key = kv_len - width + torch.arange(width, device=device)
    is_hidden = ~_sees(batch.tree_mask, query - (query_len - num_nodes), key - (kv_len - num_tree_keys), num_nodes)
    is_after = key > kv_len - query_len + query
    is_inside = (query >= query_len - num_nodes) & (key >= kv_len - num_tree_keys)
    is_hidden = torch.where(is_inside, is_hidden, is_after) & (query < query_len) & (key >= 0)
    bit = query * kv_len + key
    byte = (first + bit // 8).clamp(0, starts[-1] - 1)
    bits = torch.full((starts[-1],), 255, dtype=torch.int32, device=device)
    bits.scatter_add_(0, byte.flatten(), (is_hidden * -(1 << bit % 8)).to(torch.int32).flatten())
    return PackedMask(bits.to(torch.uint8), _int32(starts).to(device, non_blocking=True))


def block_table(batch: AttentionBatch, page_size: int) -> BlockTable:
    """For requests whose KV slots lie in whole blocks of `page_size`."""
    device = batch.kv_slots.device
    starts, num_requests = list(accumulate(batch.query_lens, initial=0)), len(batch.kv_lens)
    lens = _int32([*starts, *batch.kv_lens]).to(device, non_blocking=True)
    query_starts, kv_lens = lens.split_with_sizes([num_requests + 1, num_requests])
    blocks = batch.kv_slots[:, : max(batch.kv_lens) : page_size] // page_size
    return BlockTable(query_starts, kv_lens, blocks.to(torch.int32))


def _sees(tree_mask: Tensor, node: Tensor, tree_key: Tensor, num_nodes: Tensor) -> Tensor:
    """bool [R, Q, K]: `tree_mask` [R, n, m] at nodes [R, Q, 1] and keys [R, 1, K]; anything outside."""
    requests, n, m = tree_mask.shape
    row = torch.arange(requests, device=tree_mask.device)[:, None, None]
    return tree_mask[row, node.clamp(0, n - 1), tree_key.clamp(0, m - 1)] & (num_nodes > 0)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
