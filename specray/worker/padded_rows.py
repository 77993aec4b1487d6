"""The rows of a drafter in a CUDA graph: shapes are fixed, and what the rows committed is known on the device alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.models.heads.block_files import BlockMask
from specray.ops.attention import Attend, PaddedAttention, PaddedBatch, pack_paths, recordable
from specray.spec_decode.draft_rows import (
    AttendLevel,
    DraftKV,
    Extras,
    ReadBlocks,
    ReadTokens,
    block_positions,
    by_layer,
)
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.torch_step_ops import ExtendInput, TorchTable
from specray.spec_decode.tree_noise import TreeNoise
from specray.spec_decode.tree_shape import TreeShape


class PaddedRows:
    """DraftRows of R rows, of which each committed up to N tokens; rows behind the requests are padding.

    The drafter's KV of all tokens before those is written.
    """

    def __init__(
        self,
        table: RequestTable,
        slots: Tensor,
        num_kept: Tensor,
        places: Tensor,
        states: Tensor,
        is_sampled: bool,
        num_drafts: int,
    ) -> None:
        """`slots` int64 [R] are those of the table: an empty request for padding.

        `num_kept` int64 [R] are the committed tokens, 0 for padding. Their hidden states of the target are at
        `places` int64 [R, N] in `states` [any, any]; entries past `num_kept` may be any valid place. Unless
        `is_sampled`, all requests are greedy. Trees have at most `num_drafts` drafts.
        """
        self.slots, self.count = slots, len(slots)
        self._table, self._num_kept, self._places, self._states = table, num_kept, places, states
        self._is_sampled, self._num_drafts = is_sampled, num_drafts
        self._read: ExtendInput | None = None  # by the first layer
        self._extra: Tensor | None = None  # int64 [R, m], KV slots behind the prefix

    @cached_property
    def ends(self) -> Tensor:
        if self._read is not None:
            return self._read.ends
        return (self._table.num_tokens.index_select(0, self.slots).long() - 1).clamp(min=0)

    @cached_property
    def roots(self) -> Tensor:
        return self._table.tokens_at(self.slots, self.ends) if self._read is None else self._read.roots

    def aux_hidden_states(self) -> Tensor:
        assert self._read is not None, "the tokens are read before"
        return self._states.index_select(0, self._read.nodes)

    def kv_slots_at(self, positions: Tensor) -> Tensor:
        return self._table.kv_slots_at(self.slots, positions)

    def read(self, kv: DraftKV, layer: int = 0, num_extra: int = 0) -> ReadTokens:
        if not kv.reads_next_token:
            return self._read_with_roots(kv)
        read = self._committed(kv)
        batch = read.attention
        if num_extra:
            return self._with_extra(kv, read, num_extra)

        def before() -> Tensor:
            return self._table.kv_slots_at(batch.rows, (read.positions - 1).clamp(min=0))

        attend = _padded(kv).plan_padded(_without_first(batch, layer))
        written = batch.slot_mapping
        return ReadTokens(read.token_ids, read.positions, written, attend, read.last[:, None], before)

    def read_blocks(self, kv: DraftKV, masks: Sequence[BlockMask]) -> ReadBlocks:
        assert kv.extra is not None
        read, blocks = self._committed(kv), kv.extra[: self.count]
        count, size = blocks.shape
        [mask] = set(masks)
        lengths = torch.arange(1, size + 1, device=blocks.device) if mask.is_causal else None
        batch = PaddedBatch(
            self.ends.repeat_interleave(size),
            self.slots.repeat_interleave(size),
            self._table.kv_slots,
            blocks.repeat_interleave(size, 0),
            torch.full((count * size,), size, device=blocks.device) if lengths is None else lengths.repeat(count),
            blocks.flatten(),
            size,
        )
        positions = block_positions(self.ends, blocks, kv.last_position)
        return ReadBlocks(read.positions, read.attention.slot_mapping, positions, _padded(kv).plan_padded(batch))

    def levels(self, kv: DraftKV, shape: TreeShape) -> AttendLevel:
        assert kv.nodes is not None
        plan, table, count, topk = _padded(kv).plan_padded, self._table, self.count, shape.topk
        nodes, extra, prefix_lens, rows = kv.nodes[:count], self._extra, self.ends, self.slots
        is_whole = topk == kv.shape.topk
        if topk > 1:
            prefix_lens, rows = (part.repeat_interleave(topk) for part in (prefix_lens, rows))

        def attend_at(level: int, sees: Tensor) -> Attend:
            seen = nodes[:, : level * topk]
            written = (kv.levels[level - 1][:count] if is_whole else seen[:, -topk:]).flatten()
            lengths = kv.depths[level - 1][:count]
            if extra is not None:
                number = extra.shape[1]
                seen, lengths = torch.cat((extra, seen), 1), lengths + number
                sees = F.pad(sees, (number, 0), value=True) if topk > 1 else sees
            paths = pack_paths(sees, seen) if topk > 1 else (seen, lengths)
            batch = PaddedBatch(prefix_lens, rows, table.kv_slots, *paths, written, topk)
            return by_layer([plan(_without_first(batch, layer)) for layer in range(kv.num_layers)])

        return attend_at

    def limited(self, shape: TreeShape) -> TreeShape:
        return shape.limited(shape.num_steps, self._num_drafts)

    def noise(self, num_levels: int) -> TreeNoise | None:
        return TreeNoise.of(self._table, self.slots, self.ends, num_levels) if self._is_sampled else None

    def _committed(self, kv: DraftKV) -> ExtendInput:
        """What each row committed, read by all layers."""
        if self._read is None:
            width = min(self._places.shape[1], kv.shape.num_steps + 1)  # the longest path of a tree
            ops, rows = self._table.ops, (self.slots, self._num_kept, self._places)
            assert isinstance(ops, TorchTable), "the CPU kernels have no graphs"
            self._read = ops.padded_extend(*rows, width, kv.padding_slot)
        return self._read

    def _with_extra(self, kv: DraftKV, read: ExtendInput, num_extra: int) -> ReadTokens:
        """The tokens of all rows, and behind them the extra ones of all rows, from position `ends` on."""
        assert kv.extra is not None
        known, count, device = read.attention, self.count, self.slots.device
        num_known, width = len(read.token_ids), max(known.paths.shape[1], num_extra)
        extra = kv.extra[:count, :num_extra]
        number = torch.arange(num_extra, device=device)
        positions = (self.ends[:, None] + number).clamp(max=kv.last_position).flatten()
        paths = [
            F.pad(part, (0, width - part.shape[1])) for part in (known.paths, extra.repeat_interleave(num_extra, 0))
        ]
        batch = PaddedBatch(
            torch.cat((known.prefix_lens, self.ends.repeat_interleave(num_extra))),
            torch.cat((known.rows, self.slots.repeat_interleave(num_extra))),
            known.kv_slots,
            torch.cat(paths),
            torch.cat((known.path_lengths, (number + 1).repeat(count))),
            torch.cat((known.slot_mapping, extra.flatten())),
            math.gcd(known.row_width, num_extra),
        )
        place = torch.arange(num_known + count * num_extra, device=device)
        extras = Extras(place >= num_known, place.clamp(max=num_known - 1))
        first = num_known + torch.arange(count, device=device)[:, None] * num_extra
        last = torch.cat((read.last[:, None], first + number), 1)
        token_ids = F.pad(read.token_ids, (0, count * num_extra))
        all_positions = torch.cat((read.positions, positions))

        def before() -> Tensor:
            return self._table.kv_slots_at(batch.rows, (all_positions - 1).clamp(min=0))

        attend = _padded(kv).plan_padded(batch)
        return ReadTokens(token_ids, all_positions, batch.slot_mapping, attend, last, before, extras)

    def _read_with_roots(self, kv: DraftKV) -> ReadTokens:
        """The committed tokens of each row, and its root behind them."""
        assert kv.extra is not None
        table, count, num_kept, ends = self._table, self.count, self._num_kept, self.ends
        width = min(self._places.shape[1], kv.shape.num_steps + 1) + 1  # a path, and the root of the next tree
        depth, starts = torch.arange(width, device=ends.device), ends - num_kept
        is_root, is_read = depth == num_kept[:, None], depth <= num_kept[:, None]
        positions = (starts[:, None] + depth).where(is_read, 0)
        rows = self.slots.repeat_interleave(width)
        self._extra = kv.extra[:count]
        known = table.kv_slots_at(rows, positions.flatten()).view_as(positions)
        kv_slots = torch.where(is_root, self._extra, known)
        batch = PaddedBatch(
            starts.repeat_interleave(width),
            rows,
            table.kv_slots,
            kv_slots.where(is_read, 0).repeat_interleave(width, 0),
            (depth + 1).repeat(count),
            kv_slots.where(is_read, kv.padding_slot).flatten(),
            width,
        )
        flat = positions.flatten()
        attend = _padded(kv).plan_padded(batch)
        last = (torch.arange(count, device=ends.device) * width + num_kept)[:, None]

        def before() -> Tensor:
            return table.kv_slots_at(rows, (flat - 1).clamp(min=0))

        # A request whose end the host does not know yet may be longer than the model's context.
        known_to_model = flat.clamp(max=kv.last_position)
        return ReadTokens(table.tokens_at(rows, flat), known_to_model, batch.slot_mapping, attend, last, before)


def _padded(kv: DraftKV) -> PaddedAttention:
    attention = recordable(kv.attention)
    assert attention is not None, "see `reason_without_graphs`"
    return attention


def _without_first(batch: PaddedBatch, count: int) -> PaddedBatch:
    """The batch without the first `count` positions of its prefixes."""
    if not count:
        return batch
    return replace(batch, kv_slots=batch.kv_slots[:, count:], prefix_lens=(batch.prefix_lens - count).clamp(min=0))
