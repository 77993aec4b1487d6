"""The operations of a step by Triton's kernels, without a read by the host; see `step_ops`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.gpu import steps
from specray.ops.gpu.sampling import Rows, choose, keys_of_nodes, walk_chosen
from specray.ops.sampling_state import SamplingBatch
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

    def choose(self, inputs: VerifyInput, first_id: int = 0) -> Choices:
        tree, sampling, keys = inputs.tree, inputs.sampling, None
        num_nodes = tree.num_nodes.contiguous()
        rows = Rows(inputs.logits.contiguous(), num_nodes.cumsum(0) - num_nodes, num_nodes, tree.tokens.shape[1])
        if not any(state.is_sampled for state in sampling.states):
            return choose(rows, None, None, first_id)
        keys = keys_of_nodes(sampling.seeds, inputs.lengths, tree.parents, tree.max_depth)
        return choose(rows, sampling, keys, first_id)

    def choose_padded(
        self, logits: Tensor, tree: DraftTree, sampling: SamplingBatch | None, lengths: Tensor, first_id: int = 0
    ) -> Choices:
        num_trees, width = tree.tokens.shape
        starts = torch.arange(0, num_trees * width, width, device=logits.device)
        rows, keys = Rows(logits, starts, tree.num_nodes.contiguous(), width), None
        if sampling is not None:
            keys = keys_of_nodes(sampling.seeds, lengths, tree.parents, tree.max_depth)
        return choose(rows, sampling, keys, first_id)

    def verify_padded(self, inputs: PaddedVerifyInput, sampler: NodeSampler) -> VerifyOutput:
        tree = inputs.tree
        choices = self.choose_padded(inputs.logits, tree, inputs.drawn, inputs.lengths)
        chosen = at_nodes(sampler, choices.tokens.view(tree.tokens.shape), inputs)
        return self.accept(tree, choices._replace(tokens=chosen.flatten()))

    def accept(self, tree: DraftTree, choices: Choices) -> VerifyOutput:
        return VerifyOutput(walk_chosen(choices, tree.tokens, tree.parents, tree.num_nodes, tree.max_depth))


class TritonTable(TorchTable):
    """TableOps, and those of graphs."""

    def cells(self, slots: Tensor, positions: Tensor, column: int) -> Tensor:
        return steps.cells_at(self.buffer, slots, positions, column)

    def load_step(self, step: Sequence[Tensor], slots: Tensor, tree: DraftTree) -> None:
        steps.load(step, slots, tree.num_nodes, (tree.tokens, tree.parents), self.padding_slot)

    def tree_input(self, slots: Tensor, tree: DraftTree, padding_kv_slot: int, kept: Tensor) -> TreeInput:
        trees = (tree.tokens, tree.parents)
        return TreeInput(
            *steps.tree_input(self.buffer, slots, tree.num_nodes, trees, self.all_kv_slots, padding_kv_slot, kept)
        )

    def padded_extend(
        self,
        slots: Tensor,
        num_kept: Tensor,
        nodes: Tensor,
        width: int,
        padding_kv_slot: int,
    ) -> ExtendInput:
        parts = (slots, num_kept, nodes, width, self.all_kv_slots, padding_kv_slot)
        return ExtendInput(*steps.extend_input(self.buffer, *parts))

    def commit(self, slots: Tensor, outcome: Tensor, report: Tensor) -> None:
        steps.commit(self.buffer, report, slots, outcome)
