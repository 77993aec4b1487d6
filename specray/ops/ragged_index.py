"""Places in rows of different lengths that are stored one after the other."""

from typing import NamedTuple

import torch
from torch import Tensor


class RaggedIndex(NamedTuple):
    """T elements of concatenated rows: element t is number `offsets[t]` of row `rows[t]`."""

    rows: Tensor  # int64 [T]
    offsets: Tensor  # int64 [T]

    @classmethod
    def of(cls, lengths: Tensor, total: int) -> "RaggedIndex":
        """From the rows' `lengths` int64 [rows], whose sum `total` is known on the host."""
        device = lengths.device
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=total)
        starts = lengths.cumsum(0) - lengths
        return cls(rows, torch.arange(total, device=device) - starts.index_select(0, rows))
