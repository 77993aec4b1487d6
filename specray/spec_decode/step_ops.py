"""The operations of a step around its forward passes, and the choice of a device's.

They build the input, keep what was committed, hold trees that wait for the next step, and verify trees. These are a few
numbers for each request: on a CPU each group is one call of the kernels, on a GPU one launch of Triton's. What they do
says `torch_step_ops`.
"""

from functools import cache

import torch

from specray.ops.cpu.ops import CpuOps
from specray.ops.device_ops import ops_on
from specray.spec_decode.kernel_step_ops import KernelStepOps
from specray.spec_decode.torch_step_ops import TorchStepOps


def step_ops(device: torch.device) -> TorchStepOps:
    """Those that belong to the device's `ops_on`."""
    ops = ops_on(device)
    if isinstance(ops, CpuOps):
        return _kernel_ops(ops.kernels)
    return _triton_ops() if ops.name == "triton" else _torch_ops(device)


@cache
def _triton_ops() -> TorchStepOps:
    from specray.spec_decode.triton_step_ops import TritonStepOps  # as in `ops_on`

    return TritonStepOps()


_kernel_ops, _torch_ops = cache(KernelStepOps), cache(TorchStepOps)
