"""Masks of the tokens that grammars allow, packed to one bit a token, as llguidance writes them."""

from typing import NamedTuple

from torch import Tensor

_BITS = 32  # of a word


class TokenMask(NamedTuple):
    """The tokens that are allowed at n rows of a step's logits; all are allowed at the others."""

    rows: Tensor  # int64 [n], on the host
    bits: Tensor  # int32 [n, ceil(V / 32)], on the host: bit i of word j is set if token 32 * j + i is allowed


def num_words(vocab_size: int) -> int:
    """Words of a row of bits."""
    return -(-vocab_size // _BITS)
