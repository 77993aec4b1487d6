"""The product of two tiles, as all Triton kernels compute it."""

import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16 as if its bits were integers.
_WIDENS: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, sums):
    """sums + a b, summed in float32."""
    if _WIDENS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
