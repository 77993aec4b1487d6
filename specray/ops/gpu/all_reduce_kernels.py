"""The one-shot all-reduce with Triton: every rank reads all ranks' parts, and adds them in the order of ranks."""

import triton
import triton.language as tl

from specray.ops.gpu.layer_kernels import norm_values
from specray.ops.gpu.shared_kernels import wait_for_kernels_before


@triton.jit
def sum_over_ranks(
    x,  # [num_rows, SIZE]: this rank's part, then the sum
    residual,  # [num_rows, SIZE] and [SIZE]; unused without NORMS, like `out` and `eps`
    out,
    weight,
    eps,
    addresses,  # int64 [RANKS]: where each rank's memory of all programs begins, see `specray.ops.peer_buffers`
    turns,  # int64 [programs]: this rank's sums so far in which a program took part, and met all others
    rank,
    num_rows,
    region_size,  # elements of a program's buffer; it has two
    FLAG_BYTES: tl.constexpr,  # of all programs
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    MOST_POLLS: tl.constexpr,  # of a rank's flag, after which it goes on without that rank; 0: it waits for ever
    EARLY: tl.constexpr,
):
    """A program meets the programs of its number on the other ranks, and nobody else.

    It copies its rows to one of its buffers, says so to the others, and waits for them. It takes its buffers in turn:
    a rank that says so again has read all of the sum before, so the buffer of that sum is free. All programs run at
    once, or one might wait for another that has not started.
    """
    wait_for_kernels_before(EARLY)
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    is_column = column < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    turn = tl.load(turns + program) + 1
    region = (program * 2 + turn % 2) * region_size + column
    own = tl.load(addresses + rank)
    for row in range(program, num_rows, tl.num_programs(0)):
        place = region + (row - program) // tl.num_programs(0) * SIZE
        values = tl.load(x + row * SIZE + column, mask=is_column)
        tl.store(_pointer(own + FLAG_BYTES, dtype) + place, values, mask=is_column)
    tl.debug_barrier()  # all threads have written
    for other in tl.static_range(RANKS):
        flags = tl.load(addresses + other).to(tl.pointer_type(tl.int64)) + program * RANKS
        tl.atomic_xchg(flags + rank, turn, sem="release", scope="sys")
    met = turn
    for other in tl.static_range(RANKS):
        flag = own.to(tl.pointer_type(tl.int64)) + program * RANKS + other
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        num_polls = turn * 0
        while (seen < turn) & ((MOST_POLLS == 0) | (num_polls < MOST_POLLS)):  # one that is ahead is at turn + 1
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            num_polls += 1
        met = tl.minimum(met, seen)
    tl.debug_barrier()
    for row in range(program, num_rows, tl.num_programs(0)):
        place = region + (row - program) // tl.num_programs(0) * SIZE
        summed = tl.zeros([PADDED], dtype)
        for other in tl.static_range(RANKS):
            part = _pointer(tl.load(addresses + other) + FLAG_BYTES, dtype) + place
            values = tl.load(part, mask=is_column, other=0.0)
            # Rounded after each rank, like the sum of gathered parts.
            summed = values if other == 0 else (summed.to(tl.float32) + values.to(tl.float32)).to(dtype)
        target = row * SIZE + column
        if NORMS:
            values = tl.load(residual + target, mask=is_column, other=0.0)
            summed = (summed.to(tl.float32) + values.to(tl.float32)).to(dtype)
            normed = norm_values(summed.to(tl.float32), weight, column, is_column, eps, SIZE)
            tl.store(out + target, normed.to(out.dtype.element_ty), mask=is_column)
        tl.store(x + target, summed, mask=is_column)
    tl.store(turns + program, met)


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """Aligned, so that threads read as much at once as from other tensors, and sum a row in the same order."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
