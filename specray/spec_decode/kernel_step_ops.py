"""The operations of a step by the CPU kernels; see `step_ops`."""

from torch import Tensor

from specray.ops.cpu.library import Kernels
from specray.ops.cpu.steps import TableKernels, TreeKernels
from specray.ops.cpu.tree_walk import walk, walk_chosen
from specray.ops.step_tensors import RequestBuffer
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.torch_step_ops import TableOps, TorchStepOps, TreeOps
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput


class KernelStepOps(TorchStepOps):
    """See TorchStepOps."""

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
