"""Counter-based noise: pure functions of a request's seed, an absolute position and a token id or column.

All randomness of the engine comes from here. Nothing is drawn from a generator, so noise does not depend on the batch,
the order of requests, the replica or the drafter. Siblings of a draft tree share a position and so share their noise.
"""

from functools import cache

import torch
from torch import Tensor


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Keys of `gumbel`, int32 [..., 2], from int64 tensors that broadcast to [...].

    A position is that of the token to sample. Computed once for all depths, because it takes about thirty operations.
    """
    words = _splitmix(_splitmix(seeds) ^ positions)
    return torch.stack((words >> 32, words), -1).to(torch.int32)  # the conversion keeps the low 32 bits


def gumbel(keys: Tensor, vocab_size: int, ids: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [..., vocab_size], of `noise_keys` [..., 2].

    `ids` int64 [vocab_size] are the token ids of the columns; None: all ids in order.
    """
    hashes = _vocab_hash(vocab_size, keys.device) if ids is None else _hash(ids.to(torch.int32))
    bits = _mix(hashes + keys[..., :1], keys[..., 1:])
    # 31 bits, inside (0, 1) at both ends; exact for small values, which give the large Gumbel values.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Uniform in (0, 1), float64, of int64 tensors that broadcast; independent of `gumbel` for the same seed."""
    words = _splitmix(_splitmix(_splitmix(salted(seeds)) ^ positions) ^ columns)
    return (_shift64(words, 12).double() + 0.5) * 2.0**-52


def salted(seeds: Tensor) -> Tensor:
    """Seeds for noise that must be independent of that of `seeds`."""
    return _splitmix(seeds ^ _signed64(0xD1B54A32D192ED03))


def _splitmix(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014) on int64, which wraps as uint64 does."""
    words = words + _signed64(0x9E3779B97F4A7C15)
    words = (words ^ _shift64(words, 30)) * _signed64(0xBF58476D1CE4E5B9)
    words = (words ^ _shift64(words, 27)) * _signed64(0x94D049BB133111EB)
    return words ^ _shift64(words, 31)


def _signed64(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shift64(words: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (words >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: Tensor, key: Tensor | int) -> Tensor:
    """Two rounds of a 32-bit integer hash, in place, with the key's second word between them."""
    bits ^= _shift32(bits, 16)
    bits *= 0x7FEB352D
    bits ^= _shift32(bits, 15)
    bits += key
    bits *= -0x7B935975  # 0x846CA68B
    bits ^= _shift32(bits, 16)
    return bits


def _shift32(bits: Tensor, count: int) -> Tensor:
    """Logical right shift of int32."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


@cache
def _vocab_hash(vocab_size: int, device: torch.device) -> Tensor:
    return _hash(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _hash(ids: Tensor) -> Tensor:
    """A hash of each token id, int32 like `ids`: the part of the noise that does not depend on the key."""
    bits = (ids + 1) * -0x61C88647  # 0x9E3779B9
    return _mix(bits, 0x2545F491)
