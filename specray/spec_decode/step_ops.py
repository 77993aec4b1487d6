"""The operations of a step around its forward passes, and the choice of a device's.

They build the input, keep what was committed, hold trees that wait for the next step, and verify trees. These are a few
numbers for each request: on a CPU each group is one call of the kernels, on a GPU one launch of Triton's. What they do
says `torch_step_ops`.
"""

from functools import cache

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.ops import CpuOps
from specray.ops.cpu.sampling import walk, walk_chosen
from specray.ops.cpu.steps import TableKernels, TreeKernels
from specray.ops.device_ops import ops_on
from specray.ops.step_tensors import RequestBuffer
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.torch_step_ops import TableOps, TorchStepOps, TreeOps
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput


def step_ops(device: torch.device) -> TorchStepOps:
    """Those that belong to the device's `ops_on`."""
    ops = ops_on(device)
    if isinstance(ops, CpuOps):
        return _kernel_ops(ops.kernels)
    return _triton_ops() if ops.name == "triton" else _torch_ops(device)


class KernelStepOps(TorchStepOps):
    """By the CPU kernels."""

    walks_sampled = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def table(self, buffer: RequestBuffer) -> TableOps:
        return TableKernels(self._kernels, buffer)

    def trees(self) -> TreeOps:
        return TreeKernels(self._kernels)

    def verify(self, inputs: VerifyInput) -> VerifyOutput:
        tree = inputs.tree
        parts = (tree.tokens, tree.parents, tree.num_nodes, tree.max_depth, inputs.sampling, inputs.lengths)
        return VerifyOutput(walk(self._kernels, inputs.logits, *parts))

    def verify_chosen(self, tokens: Tensor, tree: DraftTree) -> VerifyOutput:
        return VerifyOutput(
            walk_chosen(self._kernels, tokens, tree.tokens, tree.parents, tree.num_nodes, tree.max_depth)
        )


@cache
def _triton_ops() -> TorchStepOps:
    from specray.spec_decode.triton_step_ops import TritonStepOps  # as in `ops_on`

    return TritonStepOps()


_kernel_ops, _torch_ops = cache(KernelStepOps), cache(TorchStepOps)
