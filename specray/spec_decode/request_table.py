"""The requests of one rank by slot: tensors for input building, sampling and drafting, and their host mirror.

The tensors are views of one int32 buffer on the device. On a CPU, changes are written at once; for another device see
`table_changes`. The host keeps what determines shapes: token ids, lengths and KV slots.
A slot is a row of this table; a KV slot is one token's place in the KV pool.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from specray.ops.attention import make_zeros
from specray.ops.sampling_state import OptionColumns, SamplingBatch
from specray.ops.step_tensors import RequestBuffer
from specray.spec_decode.request_state import RequestState, sampling_columns
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.table_changes import TableChanges
from specray.step import NewRequest

_NUM_SCALARS = 8  # int32 columns behind token ids and KV slots: see RequestTable.__init__


class RequestTable:
    """Requests by slot. After `flush`, the device has the changes of `enter` and `extend`."""

    def __init__(self, num_slots: int, max_tokens: int, page_size: int, vocab_size: int, device: torch.device) -> None:
        """`max_tokens` bounds a request's KV slots: its tokens and a draft tree behind them."""
        self.num_slots, self.max_tokens, self.page_size, self.vocab_size = num_slots, max_tokens, page_size, vocab_size
        self._width = max_tokens + max_tokens % 2  # even, so that the seeds are aligned
        self._row = 2 * self._width + _NUM_SCALARS
        # The last row takes masked writes, and is an empty request for padding.
        buffer = make_zeros((num_slots + 1, self._row), torch.int32, device)
        self.padding_slot = num_slots
        scalars = 2 * self._width
        self._buffer = buffer.view(-1)
        self.buffer = RequestBuffer(self._buffer, self._row, self._width, scalars)
        self.token_ids = buffer[:, : self._width]
        self.kv_slots = buffer[:, self._width : scalars]
        self.num_tokens = buffer[:, scalars]
        self._scalars = buffer[:, scalars:]
        self.seeds = buffer.view(torch.int64)[:, scalars // 2 + 1]
        self.temperature = buffer.view(torch.float32)[:, scalars + 5]
        self.host_kv_slots = np.zeros((num_slots, self._width), dtype=np.int32)
        self.states: dict[int, RequestState] = {}
        self.device = device
        # One of them writes changes: at once on a CPU, by `flush` on another device.
        self._host_buffer = self._buffer.numpy() if device.type == "cpu" else None
        self._changes = TableChanges(self._buffer)
        self.ops = step_ops(device).table(self.buffer)

    def enter(self, new: NewRequest) -> None:
        """Start a request in its slot."""
        self.states[new.slot] = RequestState.start(new, self.vocab_size, self.device)
        self._change(new.slot, 2 * self._width + 2, sampling_columns(new.sampling))
        self.extend(new.slot, new.token_ids, new.block_ids)

    def extend(self, slot: int, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Append known tokens and KV blocks."""
        state = self.states[slot]
        if token_ids:
            self._change(slot, len(state.token_ids), token_ids)
            state.token_ids += token_ids
            self._change(slot, 2 * self._width, [len(state.token_ids)])
        if block_ids:
            blocks = np.array(block_ids, dtype=np.int32)
            kv_slots = (blocks[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)).ravel()
            start = state.num_kv_slots
            kv_slots = kv_slots[: self._width - start]  # the last page may extend beyond the longest request
            state.num_kv_slots += len(kv_slots)
            self.host_kv_slots[slot, start : state.num_kv_slots] = kv_slots
            self._change(slot, self._width + start, cast("list[int]", kv_slots.tolist()))
            state.block_ids += block_ids

    def free(self, slot: int) -> None:
        del self.states[slot]

    def numbers(self, *rows: Sequence[int]) -> Tensor:
        """int64 [n] of one row of numbers, [len(rows), n] of several, on the device."""
        found = np.array(rows[0] if len(rows) == 1 else rows, dtype=np.int64)
        if not found.size:  # an empty array may have strides that no tensor has
            return torch.empty(found.shape, dtype=torch.int64, device=self.device)
        tensor = torch.from_numpy(found)
        return tensor if self._host_buffer is not None else tensor.to(self.device, non_blocking=True)

    def flush(self, *rows: Sequence[int]) -> Tensor:
        """Write all changes that wait to the device. `rows` are copied along and returned as int64 [len(rows), n]."""
        return self._changes.write(rows) if self._changes.waiting else self.numbers(*rows)

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Token ids, int64 [T]; `slots` and `positions` are int64 [T]."""
        return self.ops.cells(slots, positions, 0)

    def last_tokens(self, slots: Tensor) -> Tensor:
        """The last known tokens of requests, int64 [B], which the host may not know yet."""
        return self.tokens_at(slots, self.num_tokens.index_select(0, slots).long() - 1)

    def kv_slots_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """KV slots, int64 [T]."""
        return self.ops.cells(slots, positions, self._width)

    def sampling(self, slots: Tensor, states: Sequence[RequestState]) -> SamplingBatch:
        """Sampling options of requests; `states` are those of `slots`, or none if the host does not look at them."""

        def make_columns() -> OptionColumns:
            rows = self._scalars.index_select(0, slots)  # one gather, of which the options are views
            floats, seeds = rows.view(torch.float32), rows.view(torch.int64)[:, 1]
            return OptionColumns(seeds, floats[:, 5], rows[:, 4].long(), floats[:, 6], floats[:, 7])

        return SamplingBatch([state.sampling for state in states], make_columns)

    def _change(self, slot: int, column: int, values: Sequence[int]) -> None:
        first = slot * self._row + column
        if self._host_buffer is None:
            self._changes.waiting.append((first, values))
        else:
            self._host_buffer[first : first + len(values)] = values
