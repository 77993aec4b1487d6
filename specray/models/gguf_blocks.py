"""GGUF's quantised blocks as GroupedWeight: the same integers, scales and lows, nothing rounded again.

Layouts are those of ggml-common.h: a block of 32 or 256 weights holds its scales and the bits of its integers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from specray.ops.grouped_weight import GroupedWeight

Bytes = npt.NDArray[Any]  # uint8; numpy types shifts of uint8 as signed integers
Floats = npt.NDArray[Any]  # float32
# (integers uint8 [n, weights], scales [n, groups], lows or None, zero) of n blocks
Parts = tuple[Bytes, Floats, Floats | None, int]


BLOCKS_FILE = "gguf-blocks.safetensors"  # beside a converted model's float32 weights


def grouped_weight(kind: str, data: "torch.Tensor") -> "GroupedWeight | None":
    """Rows of blocks uint8 [outs, bytes] of GGML type `kind`; None for types that are not groups of small integers."""
    import torch  # imported here, because processes that convert files do not need torch

    from specray.ops.grouped_weight import GroupedWeight

    if kind not in _TYPES:
        return None
    block_bytes, block_size, bits, decode = _TYPES[kind]
    outs, num_blocks = len(data), data.shape[1] // block_bytes
    ints, scales, lows, zero = decode(data.numpy().reshape(-1, block_bytes))
    low_tensor = None if lows is None else torch.from_numpy(np.ascontiguousarray(lows)).view(outs, -1)
    return GroupedWeight(
        num_blocks * block_size,
        torch.from_numpy(np.ascontiguousarray(ints)).view(outs, -1),
        torch.from_numpy(np.ascontiguousarray(scales)).view(outs, -1),
        low_tensor,
        zero,
        bits,
    )


def _halves(data: Bytes) -> Floats:
    """float16 numbers [n, k] from bytes [n, 2 * k]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """The low nibbles of each row's bytes, then the high ones."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _high_bits(data: Bytes) -> Bytes:
    """Bits [n, 32] of four bytes, the lowest first."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _q4_0(data: Bytes) -> Parts:
    return _nibbles(data[:, 2:]), _halves(data[:, :2]), None, 8


def _q4_1(data: Bytes) -> Parts:
    return _nibbles(data[:, 4:]), _halves(data[:, :2]), _halves(data[:, 2:4]), 0


def _q5_0(data: Bytes) -> Parts:
    return _nibbles(data[:, 6:]) | _high_bits(data[:, 2:6]) << 4, _halves(data[:, :2]), None, 16


def _q5_1(data: Bytes) -> Parts:
    ints = _nibbles(data[:, 8:]) | _high_bits(data[:, 4:8]) << 4
    return ints, _halves(data[:, :2]), _halves(data[:, 2:4]), 0


def _q8_0(data: Bytes) -> Parts:
    return data[:, 2:] ^ 0x80, _halves(data[:, :2]), None, 128


# The values of 4-bit floats (e2m1), doubled, and those of ggml's table for 4 bits.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _mxfp4(data: Bytes) -> Parts:
    """The block's scale is a power of two, 2^(byte - 127), and is halved because the values are doubled."""
    scales = np.exp2(data[:, :1].astype(np.float32) - 128.0)
    return (_E2M1[_nibbles(data[:, 1:])] + 12).astype(np.uint8), scales, None, 12


def _iq4_nl(data: Bytes) -> Parts:
    return (_IQ4[_nibbles(data[:, 2:])].astype(np.int16) + 128).astype(np.uint8), _halves(data[:, :2]), None, 128


def _scales_and_lows(data: Bytes) -> tuple[Floats, Floats]:
    """Of the eight groups of Q4_K and Q5_K, from d, dmin and twelve bytes with eight pairs of 6-bit factors."""
    packed = data[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6) << 4), 1)
    lows = np.concatenate((middle & 63, (high >> 4) | (middle >> 6) << 4), 1)
    return _halves(data[:, :2]) * scales, -(_halves(data[:, 2:4]) * lows)


def _q4_k(data: Bytes) -> Parts:
    ints = _nibbles(data[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return ints, *_scales_and_lows(data), 0


def _q5_k(data: Bytes) -> Parts:
    low = _nibbles(data[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (low | high << 4).reshape(-1, 256), *_scales_and_lows(data), 0


def _q6_k(data: Bytes) -> Parts:
    low = _nibbles(data[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = (data[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    scales = data[:, 192:208].view(np.int8).astype(np.float32) * _halves(data[:, 208:])
    return (low | high << 4).reshape(-1, 256), scales, None, 32


def _two_bits(data: Bytes) -> Bytes:
    """Integers [n, 256] from 64 bytes: of each 32 bytes first all lowest pairs of bits, then the next."""
    pairs = data.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (pairs & 3).reshape(-1, 256)


def _q2_k(data: Bytes) -> Parts:
    scales, lows = data[:, :16] & 15, data[:, :16] >> 4
    return _two_bits(data[:, 16:80]), _halves(data[:, 80:82]) * scales, -(_halves(data[:, 82:]) * lows), 0


def _q3_k(data: Bytes) -> Parts:
    high = (data[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    packed = data[:, 96:108]
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    top = (packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    factors = (low | top.reshape(-1, 16) << 4).astype(np.float32) - 32
    return _two_bits(data[:, 32:96]) | high.reshape(-1, 256) << 2, factors * _halves(data[:, 108:]), None, 4


# GGML type: (bytes of a block, weights of a block, bits, decoder)
_TYPES: dict[str, tuple[int, int, int, Callable[[Bytes], Parts]]] = {
    "Q4_0": (18, 32, 4, _q4_0),
    "Q4_1": (20, 32, 4, _q4_1),
    "Q5_0": (22, 32, 8, _q5_0),
    "Q5_1": (24, 32, 8, _q5_1),
    "Q8_0": (34, 32, 8, _q8_0),
    "IQ4_NL": (18, 32, 8, _iq4_nl),
    "MXFP4": (17, 32, 8, _mxfp4),
    "Q2_K": (84, 256, 8, _q2_k),
    "Q3_K": (110, 256, 8, _q3_k),
    "Q4_K": (144, 256, 4, _q4_k),
    "Q5_K": (176, 256, 8, _q5_k),
    "Q6_K": (210, 256, 8, _q6_k),
}
BLOCK_TYPES = frozenset(_TYPES)
