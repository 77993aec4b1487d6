"""The operations of a step by Triton's kernels, without a read by the host; see `step_ops`."""

from collections.abc import Sequence

from torch import Tensor

from specray.ops.gpu import steps
from specray.ops.gpu.sampling import Rows, choose, keys_of_nodes, walk_chosen
from specray.ops.step_tensors import Choices, RequestBuffer
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.node_sampler import NodeSampler
from specray.spec_decode.torch_step_ops import ExtendInput, TorchStepOps, TorchTable, TreeInput, TreeOps, at_nodes
from specray.spec_decode.verify_batch import PaddedVerifyInput, VerifyInput, VerifyOutput


class TritonStepOps(TorchStepOps):
    """See TorchStepOps."""

    walks_sampled = False

    def __init__(self) -> None:
        """The kernels have no state."""

    def table(self, buffer: RequestBuffer) -> "TritonTable":
        return TritonTable(buffer)

    def trees(self) -> TreeOps:
        return steps.TritonTreeOps()

    def release_trees(self, flag: Tensor, number: int) -> None:
        steps.release(flag, number)

    def await_trees(
        self, flag: Tensor, num_nodes: Tensor, most_nodes: int, number: int, timeout_s: float
    ) -> tuple[Tensor, Tensor]:
        return steps.await_released(flag, num_nodes, most_nodes, number, timeout_s)

    def verify(self, inputs: VerifyInput) -> VerifyOutput:
        return self.accept(inputs.tree, self.choose(inputs))

    def choose(self, inputs: VerifyInput | PaddedVerifyInput, first_id: int = 0) -> Choices:
        tree, options, logits = inputs.tree, inputs.drawn, inputs.logits.contiguous()
        if options is None:
            return choose(Rows(logits), None, None, first_id)
        of_trees = (tree.num_nodes, tree.parents, tree.max_depth)
        keys, trees = keys_of_nodes(options.seeds, inputs.lengths, *of_trees, len(logits))
        return choose(Rows(logits, trees), options, keys, first_id)

    def verify_padded(self, inputs: PaddedVerifyInput, sampler: NodeSampler) -> VerifyOutput:
        choices = self.choose(inputs)
        return self.accept(inputs.tree, choices._replace(tokens=at_nodes(sampler, choices.tokens, inputs)))

    def accept(self, tree: DraftTree, choices: Choices) -> VerifyOutput:
        return VerifyOutput(walk_chosen(choices, tree.tokens, tree.parents, tree.num_nodes, tree.max_depth))


class TritonTable(TorchTable):
    """TableOps, and those of graphs."""

    def cells(self, slots: Tensor, positions: Tensor, column: int) -> Tensor:
        return steps.cells_at(self.buffer, slots, positions, column)

    def load_step(self, step: Sequence[Tensor], slots: Tensor, tree: DraftTree) -> None:
        steps.load(step, slots, tree.num_nodes, (tree.tokens, tree.parents), self.padding_slot)

    def tree_input(self, slots: Tensor, tree: DraftTree, padding_kv_slot: int, kept: Tensor, total: int) -> TreeInput:
        trees, kv = (tree.tokens, tree.parents), (self.all_kv_slots, padding_kv_slot)
        return TreeInput(*steps.tree_input(self.buffer, slots, tree.num_nodes, trees, *kv, kept, total))

    def padded_extend(
        self,
        slots: Tensor,
        num_kept: Tensor,
        states: Tensor,
        width: int,
        padding_kv_slot: int,
    ) -> ExtendInput:
        parts = (slots, num_kept, states, width, self.all_kv_slots, padding_kv_slot)
        return ExtendInput(*steps.extend_input(self.buffer, *parts))

    def commit(self, slots: Tensor, outcome: Tensor, report: Tensor) -> None:
        steps.commit(self.buffer, report, slots, outcome)
