"""Changes of a request table on a device that the host cannot write: one copy and one scatter a step."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


class TableChanges:
    """Changes that wait on the host for `write` to the int32 `buffer`."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self.waiting: list[tuple[int, Sequence[int]]] = []  # (first place in the buffer, values)

    def write(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Write the changes that wait, at least one. `rows` are copied along and returned as int64 [len(rows), n]."""
        changes, self.waiting = self.waiting, []
        extra = np.array(rows, dtype=np.int64)
        lengths = np.array([len(values) for _, values in changes])
        ends = lengths.cumsum()
        firsts = np.array([first for first, _ in changes], dtype=np.int64) - (ends - lengths)
        places = np.arange(ends[-1]) + firsts.repeat(lengths)
        values = np.fromiter(chain.from_iterable(part for _, part in changes), np.int32, len(places))
        parts = (extra.ravel().view(np.int32), places.view(np.int32), values)
        packed = torch.from_numpy(np.concatenate(parts)).to(self._buffer.device, non_blocking=True)
        columns, index, written = packed.split_with_sizes([len(part) for part in parts])
        self._buffer.index_copy_(0, index.view(torch.int64), written)
        if not extra.size:  # an empty array may have strides that no view fits
            return torch.empty(extra.shape, dtype=torch.int64, device=self._buffer.device)
        return columns.view(torch.int64).view(extra.shape)
