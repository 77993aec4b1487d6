"""How a kernel waits that may have started early: see `specray.ops.gpu.early_start`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_kernels_before(EARLY: tl.constexpr):
    """Until all kernels before have ended. Only then may the next one start: it has to wait for this one alone."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
