"""Rows of an ordinary step for draft models: the host knows how many tokens they read, and chooses their keys."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.models.heads.block_files import BlockMask
from specray.ops.attention import Attend, AttentionBatch
from specray.ops.step_tensors import RaggedIndex
from specray.spec_decode.draft_rows import (
    AttendLevel,
    DraftKV,
    Extras,
    ReadBlocks,
    ReadTokens,
    block_positions,
    by_layer,
)
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape


class Reads(NamedTuple):
    """What one layer reads of R requests, those that get a tree first, and the KV that it then has of them."""

    requests: Sequence[DraftRequest]  # those from `start` to before `end`
    bounds: Tensor  # int64 [3, R]: their slots, starts and ends
    kv_slots: Tensor  # int64 [R, n]
    kv_lens: list[int]  # how many of them each request has


Prefix = tuple[Tensor, list[int]]  # KV slots int64 [B, n], and how many of them each request has


class ScheduledRows:
    """DraftRows of a step whose numbers of tokens the host knows."""

    def __init__(
        self,
        context: ProposeContext,
        requests: Sequence[DraftRequest],
        reads: Sequence[Reads],
        prefixes: Sequence[Prefix] = (),
    ) -> None:
        """`requests` get a tree: they are the first of those that `reads[0]` has. `reads` has one entry a layer.

        `prefixes` are the layers' KV before the trees; by default that of `reads`.
        """
        self.context, self.requests, self.count = context, requests, len(requests)
        self._reads = reads
        self.prefixes = list(prefixes) or [self._first(read.kv_slots, read.kv_lens) for read in reads]
        self.slots, _, self.ends = (column[: self.count] for column in reads[0].bounds)

    @cached_property
    def roots(self) -> Tensor:
        return self.context.table.tokens_at(self.slots, self.ends)

    def aux_hidden_states(self) -> Tensor:
        assert self.context.aux_hidden_states is not None
        return self.context.aux_hidden_states

    def kv_slots_at(self, positions: Tensor) -> Tensor:
        return self.context.table.kv_slots_at(self.slots, positions)

    def read(self, kv: DraftKV, layer: int = 0, num_extra: int = 0) -> ReadTokens | None:
        reads, table = self._reads[layer], self.context.table
        if not reads.requests:
            return None
        if num_extra or not kv.reads_next_token:
            return self._read_with_extra(kv, layer, num_extra)
        requests, (slots, starts, ends), kv_slots, kv_lens = reads
        lengths = [request.end - request.start for request in requests]
        token_ids, positions, written, last = table.ops.extend_input(slots, starts, ends, sum(lengths))
        attend = kv.attention.plan(_causal(lengths, kv_lens, kv_slots, written))

        def before() -> Tensor:
            index = RaggedIndex.of(ends - starts, sum(lengths))
            return table.kv_slots_at(slots.index_select(0, index.rows), positions - 1)

        read_lens = [1] * self.count + [0] * (len(requests) - self.count)
        return ReadTokens(token_ids, positions, written, attend, last[: self.count, None], before, None, read_lens)

    def read_blocks(self, kv: DraftKV, masks: Sequence[BlockMask]) -> ReadBlocks:
        assert kv.extra is not None
        requests, (slots, starts, ends), kv_slots, kv_lens = self._reads[0]
        total = sum(request.end - request.start for request in requests)
        _, positions, written, _ = self.context.table.ops.extend_input(slots, starts, ends, total)
        blocks = kv.extra[: self.count]
        prefix = self._first(kv_slots, kv_lens)
        plans = {mask: kv.attention.plan(_block_batch(prefix, blocks, mask)) for mask in dict.fromkeys(masks)}
        attend = by_layer([plans[mask] for mask in masks] if len(plans) > 1 else [*plans.values()])
        return ReadBlocks(positions, written, block_positions(self.ends, blocks, kv.last_position), attend)

    def levels(self, kv: DraftKV, shape: TreeShape) -> AttendLevel:
        assert kv.nodes is not None
        count, topk, nodes = self.count, shape.topk, kv.nodes[: self.count]
        keys = [_appended(kv_slots, kv_lens, nodes) for kv_slots, kv_lens in self.prefixes]

        def attend_at(level: int, sees: Tensor) -> Attend:
            written = nodes[:, (level - 1) * topk : level * topk].flatten()
            plans = [
                kv.attention.plan(
                    AttentionBatch(
                        query_lens=[topk] * count,
                        kv_lens=[length + level * topk for length in kv_lens],
                        kv_slots=kv_slots,
                        slot_mapping=written,
                        tree_sizes=[(topk, level * topk)] * count,
                        tree_mask=sees,
                    )
                )
                for kv_slots, (_, kv_lens) in zip(keys, self.prefixes, strict=True)
            ]
            return by_layer(plans)

        return attend_at

    def limited(self, shape: TreeShape) -> TreeShape:
        return self.context.limited(shape, self.requests)

    def noise(self, num_levels: int) -> TreeNoise | None:
        return self.context.noise(self.requests, self.slots, self.ends, num_levels)

    def _first(self, kv_slots: Tensor, kv_lens: list[int]) -> Prefix:
        """Of the requests that get a tree."""
        return kv_slots[: self.count], kv_lens[: self.count]

    def _read_with_extra(self, kv: DraftKV, layer: int, num_extra: int) -> ReadTokens:
        assert kv.extra is not None
        requests, (slots, starts, ends), kv_slots, kv_lens = self._reads[layer]
        table, count, num_known = self.context.table, self.count, ends - starts
        gets_tree = torch.arange(len(requests), device=slots.device) < count
        added = [num_extra * (row < count) for row in range(len(requests))]
        lengths = [request.end - request.start + more for request, more in zip(requests, added, strict=True)]
        index = RaggedIndex.of(num_known + num_extra * gets_tree, sum(lengths))
        row_slots, known_of_row = slots.index_select(0, index.rows), num_known.index_select(0, index.rows)
        number = index.offsets - known_of_row
        are_extra = number >= 0
        positions = (starts.index_select(0, index.rows) + index.offsets).clamp(max=kv.last_position)
        token_ids = table.tokens_at(row_slots, torch.where(are_extra, 0, positions + 1))
        if not kv.reads_next_token:
            token_ids = table.tokens_at(row_slots, positions)
        extra = kv.extra[: len(requests), : max(1, num_extra)]
        written = table.kv_slots_at(row_slots, torch.where(are_extra, 0, positions))
        written = torch.where(are_extra, extra[index.rows, number.clamp(min=0)], written)
        keys = _appended(kv_slots, kv_lens, extra[:, :num_extra])
        key_lens = [length + more for length, more in zip(kv_lens, added, strict=True)]
        self.prefixes[layer] = self._first(keys, key_lens)
        first = (num_known.cumsum(0) - num_known).index_select(0, index.rows)
        known = first + torch.minimum(index.offsets, known_of_row - 1)
        last = (num_known + num_extra * gets_tree).cumsum(0)[:count, None] - 1
        last = last + torch.arange(-num_extra, 1, device=slots.device)
        attend = kv.attention.plan(_causal(lengths, key_lens, keys, written))

        def before() -> Tensor:
            return table.kv_slots_at(row_slots, positions - 1)

        return ReadTokens(token_ids, positions, written, attend, last, before, Extras(are_extra, known))


def _causal(lengths: list[int], kv_lens: list[int], kv_slots: Tensor, written: Tensor) -> AttentionBatch:
    """Consecutive tokens of each request."""
    return AttentionBatch(lengths, kv_lens, kv_slots, written, [(0, 0)] * len(lengths))


def _block_batch(prefix: Prefix, blocks: Tensor, mask: BlockMask) -> AttentionBatch:
    """The rows of `blocks`, KV slots int64 [B, rows], behind their contexts."""
    (kv_slots, kv_lens), (count, size), window, device = prefix, blocks.shape, mask.window, blocks.device
    lengths, written = [size] * count, blocks.flatten()
    if mask.is_causal and window is None:
        kv_lens = [length + size for length in kv_lens]
        return AttentionBatch(lengths, kv_lens, _appended(*prefix, blocks), written, [(0, 0)] * count)
    seen = [0 if window is None else min(length, window - 1) for length in kv_lens]  # keys before the block, by a mask
    if window is not None:  # those that no row sees are left out: its distance from the first row is the smallest
        last = torch.tensor([kv_lens, seen], device=device)
        places = (last[0] - last[1])[:, None] + torch.arange(max(seen, default=0), device=device)
        kv_slots, kv_lens = kv_slots.gather(1, places.clamp(max=kv_slots.shape[1] - 1)), seen
    starts, width = torch.tensor(seen, device=device)[:, None, None], max(seen, default=0) + size
    distance = starts + torch.arange(size, device=device)[:, None] - torch.arange(width, device=device)
    sees = distance >= 0 if mask.is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        sees = sees & (distance.abs() < window)
    return AttentionBatch(
        query_lens=lengths,
        kv_lens=[length + size for length in kv_lens],
        kv_slots=_appended(kv_slots, kv_lens, blocks),
        slot_mapping=written,
        tree_sizes=[(size, length + size) for length in seen],
        tree_mask=sees,
    )


def _appended(kv_slots: Tensor, kv_lens: list[int], more: Tensor) -> Tensor:
    """KV slots [R, n + m]: the first `kv_lens` of each request, followed by its row of `more` int64 [R, m]."""
    ends = torch.tensor(kv_lens, device=more.device)[:, None]
    places = ends + torch.arange(more.shape[1], device=more.device)
    return F.pad(kv_slots, (0, more.shape[1])).scatter_(1, places, more)
