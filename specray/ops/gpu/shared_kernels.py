"""Functions of all Triton kernels: how one waits that may have started early, and products of tiles and of rows."""

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
def dot(a, b, sums):
    """sums + a b, summed in float32."""
    if _WIDENS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def products(
    rows,  # pointers [ROWS, 1] to rows of `ins` numbers
    columns,  # pointers [COLUMNS, 1], likewise
    is_row,
    is_column,
    ins,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """float32 [ROWS, COLUMNS]: each row times each column, summed in order in steps of INPUTS."""
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, ins, INPUTS):
        place = start + tl.arange(0, INPUTS)
        is_place = place < ins
        a = tl.load(rows + place, mask=is_row[:, None] & is_place, other=0.0)
        b = tl.load(columns + place, mask=is_column[:, None] & is_place, other=0.0)
        sums = dot(a, tl.trans(b), sums)
    return sums
