"""The index of the largest logit of each row.

Without the kernels it is found in two levels, because torch's argmax does not vectorise on a CPU.
"""

import math

import torch
from torch import Tensor

from specray.ops.cpu import sampling as cpu_sampling
from specray.ops.cpu.library import kernels_on

_BLOCK = 512  # logits per block; a vocabulary without a usable divisor takes torch's argmax
_MIN_BLOCK = 32


def argmax(logits: Tensor) -> Tensor:
    """int64 [n] of `logits` [n, V]: the first index of each row's maximum, or of its first NaN."""
    if (own := kernels_on(logits.device)) is not None:
        return cpu_sampling.sample(own, logits)
    num_rows, vocab_size = logits.shape
    block = math.gcd(vocab_size, _BLOCK)
    if logits.device.type != "cpu" or block < _MIN_BLOCK:
        return logits.argmax(-1)
    blocks = logits.reshape(num_rows, vocab_size // block, block)
    best = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(num_rows), best].argmax(-1)
    return best * block + inside
