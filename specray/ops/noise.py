"""Counter noise: Gumbel variates that are a pure function of (seed, position, token id), and coins.

This is all the randomness there is. Nothing is drawn, so nothing depends on batch, order, replica or
on what a drafter did, and siblings of a tree, which share a position, share their noise.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_MASK64 = 2**64 - 1


def gumbel(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device, ids: Tensor | None = None
) -> Tensor:
    """Standard Gumbel noise, float32 [rows, vocab_size]; `positions` are those of the tokens to sample.

    `ids` int64 [vocab_size] are the token ids to make it for, where these are not all ids in order.
    """
    words = [_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    keys = torch.tensor(words, dtype=torch.int32, device=device)  # [rows, 2]
    hashes = _token_hash(vocab_size, device) if ids is None else _hash(ids.to(torch.int32))
    bits = _mix(hashes + keys[:, :1], keys[:, 1:])
    # 31 bits; exact for small values, which are the large Gumbels, and kept inside (0, 1) at both ends.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def uniform(seed: int, position: int, column: int) -> float:
    """Uniform in (0, 1), a function of the three; independent of `gumbel`."""
    word = _splitmix(_splitmix(_splitmix(salted(seed)) ^ position) ^ column)
    return ((word >> 12) + 0.5) * 2.0**-52


def salted(seed: int) -> int:
    """Another seed, for noise that must be independent of this one's."""
    return _splitmix((seed ^ 0xD1B54A32D192ED03) & _MASK64)


def _mix(bits: Tensor, key: Tensor) -> Tensor:
    """Two rounds of a 32-bit integer hash, in place, with the key's second word between them."""
    bits ^= _shift(bits, 16)
    bits *= 0x7FEB352D
    bits ^= _shift(bits, 15)
    bits += key
    bits *= -0x7B935975  # 0x846CA68B
    bits ^= _shift(bits, 16)
    return bits


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift of int32."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


@cache
def _token_hash(vocab_size: int, device: torch.device) -> Tensor:
    return _hash(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _hash(ids: Tensor) -> Tensor:
    """A well mixed 32-bit word for each token id, int32 like `ids`: the part of the hash that no key changes."""
    bits = (ids + 1) * -0x61C88647  # 0x9E3779B9
    return _mix(bits, torch.tensor(0x2545F491, dtype=torch.int32, device=ids.device))


def _key(seed: int, position: int) -> tuple[int, int]:
    """Two int32 words from a 64-bit finaliser (splitmix64) over seed and position."""
    word = _splitmix(_splitmix(seed & _MASK64) ^ position)
    return _signed(word >> 32), _signed(word & 0xFFFFFFFF)


def _splitmix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
