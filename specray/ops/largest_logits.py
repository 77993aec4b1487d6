"""The most probable tokens of each row of logits, and the selection of the kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu.library import kernels_on
from specray.ops.cpu.pointer import pointer


class LargestLogits(NamedTuple):
    """The token of the largest logit of each of n rows, in place of the logits, for steps that need no more."""

    token_ids: Tensor  # int64 [n]; -1 where logits are not finite


def top_probs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(probabilities, indexes) [..., count] of the highest of float32 `logits` [..., V], best first."""
    own = kernels_on(logits.device)
    if own is None:
        best = logits.softmax(-1).topk(count)
        return best.values, best.indices
    logits, shape = logits.contiguous(), (*logits.shape[:-1], count)
    probs, indexes = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    size = logits.shape[-1]
    own.top_probs(pointer(logits), logits.numel() // size, size, count, pointer(probs), pointer(indexes))
    return probs, indexes
