"""Masks of the tokens that grammars allow, packed to one bit a token, as llguidance writes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from specray.ops.cpu import sampling as cpu_sampling
from specray.ops.cpu.library import kernels_on

_BITS = 32  # of a word


class TokenMask(NamedTuple):
    """The tokens that are allowed at n rows of a step's logits; all are allowed at the others."""

    rows: Tensor  # int64 [n], on the host
    bits: Tensor  # int32 [n, ceil(V / 32)], on the host: bit i of word j is set if token 32 * j + i is allowed


def num_words(vocab_size: int) -> int:
    """Words of a row of bits."""
    return -(-vocab_size // _BITS)


def forbid_masked(logits: Tensor, mask: TokenMask) -> None:
    """Set the logits [m, V] of tokens that are not allowed to minus infinity, in place."""
    if logits.is_contiguous() and (own := kernels_on(logits.device)) is not None:
        cpu_sampling.forbid(own, logits, mask.rows, mask.bits)
        return
    rows, bits = mask.rows.to(logits.device), mask.bits.to(logits.device)
    is_allowed = (bits[:, :, None] >> torch.arange(_BITS, dtype=torch.int32, device=bits.device)) & 1
    is_forbidden = is_allowed.flatten(1)[:, : logits.shape[1]] == 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf))
