"""Functions of all Triton kernels: how one waits that may have started early, products of tiles, ragged rows."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter multiplies bfloat16 as if its bits were integers.
_WIDENS: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wait_for_kernels_before(EARLY: tl.constexpr):
    """Wait until all kernels before have ended; see `launches.starts_early`.

    Only then may the next one start: it has to wait for this one alone.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def start_of(lens, row, SIZE: tl.constexpr = 1):
    """Where the elements of `row` begin among those of all, int64, in groups of up to SIZE of the same row.

    `lens` int64 are the rows' numbers of elements.
    """
    start = tl.zeros([], tl.int64)
    for first in range(0, row, 128):
        before = first + tl.arange(0, 128)
        start += tl.sum((tl.load(lens + before, mask=before < row, other=0) + (SIZE - 1)) // SIZE, 0)
    return start


@triton.jit
def place_of(num_nodes, tree, node, count, WIDTH: tl.constexpr):
    """Where the nodes of a tree lie, which has `count`, tree by tree. What it lacks of WIDTH lies behind all nodes.

    A program for each tree with WIDTH `node`s: all places of padding are those of a lacking node.
    """
    start, total = start_of(num_nodes, tree), start_of(num_nodes, tl.num_programs(0))
    return tl.where(node < count, start + node, total + tree * WIDTH - start + node - count)


@triton.jit
def dot(a, b, sums):
    """sums + a b, summed in float32."""
    if _WIDENS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def from_float8(codes, dtype: tl.constexpr, MANTISSA: tl.constexpr, CONVERTS: tl.constexpr):
    """The numbers, of `dtype`, of float8 `codes` uint8: e5m2 with a MANTISSA of 2 bits, e4m3 of 3.

    CONVERTS: the GPU has an instruction for e4m3.
    """
    if MANTISSA == 2:  # the upper half of a float16
        return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    if CONVERTS:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    wide = codes.to(tl.uint16)  # of float16 only the exponent is larger, by 8
    numbers = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True).to(dtype) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers).to(dtype)


@triton.jit
def to_float8(values, MANTISSA: tl.constexpr):
    """The codes of float32 `values`: see `from_float8`. Rounded to nearest, ties to even, and never to infinity.

    Every GPU rounds alike, also those that have no instruction for it.
    """
    shift: tl.constexpr = 23 - MANTISSA
    exponents: tl.constexpr = 120 if MANTISSA == 3 else 112  # that of float32 is so much larger
    largest: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    steps: tl.constexpr = 16384.0 if MANTISSA == 3 else 128.0  # float32 numbers from here on are whole smallest numbers
    size = tl.minimum(tl.abs(values), largest)
    bits = size.to(tl.uint32, bitcast=True)
    rounded = ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift) - (exponents << MANTISSA)
    small = (size + steps).to(tl.uint32, bitcast=True) - tl.full([], steps, tl.float32).to(tl.uint32, bitcast=True)
    code = tl.where(bits < ((exponents + 1) << 23), small, rounded)
    code = tl.where(values != values, 0x7F, code)
    sign = values.to(tl.uint32, bitcast=True) >> 24 & 0x80
    return (code | sign).to(tl.uint8)
