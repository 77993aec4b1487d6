"""The noise of Triton's kernels as tensors, in the interpreter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specray.ops.gpu import noise_kernels


def noise_of_kernels(ids: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(uniform numbers, Gumbel noise), float32 [n], of token ids int32 [n] under one key int32 [1, 2]."""
    uniform, noise = torch.empty(2, len(ids))
    _noise[(1,)](uniform, noise, ids, keys, len(ids), BLOCK=triton.next_power_of_2(len(ids)))
    return uniform, noise


@triton.jit
def _noise(uniform, noise, ids, keys, size, BLOCK: tl.constexpr):  # noqa: N803
    column = tl.arange(0, BLOCK)
    is_column = column < size
    token, first, second = tl.load(ids + column, mask=is_column, other=0), tl.load(keys), tl.load(keys + 1)
    tl.store(uniform + column, noise_kernels.uniform_of(token, first, second), mask=is_column)
    tl.store(noise + column, noise_kernels.gumbel_of(token, first, second), mask=is_column)
