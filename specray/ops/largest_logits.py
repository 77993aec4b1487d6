"""The largest logits of each row and the most probable tokens, and the selection of the kernel.

Without the kernels the largest one is found in two levels, because torch's argmax does not vectorise on a CPU.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu import sampling as cpu_sampling
from specray.ops.cpu.library import kernels_on
from specray.ops.cpu.pointer import pointer

_BLOCK = 512  # logits per block; a vocabulary without a usable divisor takes torch's argmax
_MIN_BLOCK = 32


class LargestLogits(NamedTuple):
    """The token of the largest logit of each of n rows, in place of the logits, for steps that need no more."""

    token_ids: Tensor  # int64 [n]; -1 where logits are not finite


def top_probs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(probabilities, indexes) [..., count] of the highest of float32 `logits` [..., V], best first."""
    cpu_kernels = kernels_on(logits.device)
    if cpu_kernels is None:
        best = logits.softmax(-1).topk(count)
        return best.values, best.indices
    logits, shape = logits.contiguous(), (*logits.shape[:-1], count)
    probs, indexes = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    size = logits.shape[-1]
    cpu_kernels.top_probs(pointer(logits), logits.numel() // size, size, count, pointer(probs), pointer(indexes))
    return probs, indexes


def argmax(logits: Tensor) -> Tensor:
    """int64 [n] of `logits` [n, V]: the first index of each row's maximum, or of its first NaN."""
    if (cpu_kernels := kernels_on(logits.device)) is not None:
        return cpu_sampling.sample(cpu_kernels, logits)
    num_rows, vocab_size = logits.shape
    block = math.gcd(vocab_size, _BLOCK)
    if logits.device.type != "cpu" or block < _MIN_BLOCK:
        return logits.argmax(-1)
    blocks = logits.reshape(num_rows, vocab_size // block, block)
    best = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(num_rows), best].argmax(-1)
    return best * block + inside
