"""Sampling with the CPU kernels, row by row, and masks of a grammar."""

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.threads import num_threads
from specray.ops.sampling_state import SamplingBatch


def sample(kernels: Kernels, logits: Tensor, batch: SamplingBatch | None = None, keys: Tensor | None = None) -> Tensor:
    """The next token of each row of float32 `logits` [n, V], int64 [n]; see `specray.ops.sampling`.

    `keys` int32 [n, 2] are the rows' noise. Without options and keys it is the largest logit.
    """
    count, size = logits.shape
    logits, tokens = logits.contiguous(), torch.empty(count, dtype=torch.int64)
    options: list[Tensor | None] = [None] * 5
    if batch is not None and keys is not None:
        columns = (keys, batch.temperature, batch.top_p, batch.min_p, batch.top_k)
        options = [column.contiguous() for column in columns]
    threads = min(count, num_threads())
    kernels.sample(pointer(logits), count, size, *map(pointer, options), pointer(tokens), threads)
    return tokens


def forbid(kernels: Kernels, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `specray.ops.token_mask`; float32 `logits` [m, V], int64 `rows` [n], int32 `bits` [n, words]."""
    rows, bits = rows.contiguous(), bits.contiguous()
    threads = min(len(rows), num_threads(logits.shape[1] * len(rows) * logits.itemsize))
    kernels.forbid(pointer(logits), logits.shape[1], pointer(rows), pointer(bits), bits.shape[1], len(rows), threads)
