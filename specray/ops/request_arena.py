"""Where the columns of a request table lie, for kernels that read and write it."""

from typing import NamedTuple

from torch import Tensor


class RequestArena(NamedTuple):
    """A row of `row_size` int32 cells for each slot: token ids from column 0 on, KV slots from `kv_column` on."""

    cells: Tensor  # int32 [slots * row_size]
    row_size: int
    kv_column: int
    length_column: int  # of the number of known tokens
