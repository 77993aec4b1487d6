"""Steps by the CPU kernels: a pass runs beside the host, and verifies its trees where it can."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specray.layers.parallel import RankGroup
from specray.models.fused_forward import FusedForward
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.verification import Verification, VerifiedTrees
from specray.ops.step_tensors import LargestLogits
from specray.spec_decode.drafter import UnsizedTrees
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.verify_batch import VerifyOutput
from specray.step import DraftLimit
from specray.worker.input_batch import StepBatch, build_batch
from specray.worker.model_runner import ForwardOutput, ModelRunner
from specray.worker.step_backend import Pass, StepOutcome, StepWants
from specray.worker.step_output import StepOutput
from specray.worker.torch_backend import TorchBackend


@dataclass(slots=True)
class KernelPass(Pass):
    number: int
    verification: Verification | None = None  # verification inside the pass, complete once the pass has ended
    is_early: bool = False  # it takes its tokens from the pass before it, and verifies no drafts


class KernelBackend(TorchBackend):
    """Backend of a model that the kernels have whole, as `forward`."""

    def __init__(
        self, runner: ModelRunner, forward: FusedForward, table: RequestTable, group: RankGroup, sampler: NodeSampler
    ) -> None:
        super().__init__(runner, table, group, sampler)
        self._open: set[int] = set()  # passes that were started and not waited for
        assert isinstance(table.ops, TableKernels)
        assert runner.states is None
        self._ops, self._passes, self.starts_passes = table.ops, forward, True

    def begin(self, batch: StepBatch, wants: StepWants) -> KernelPass:
        is_coupled, states = self._sampler is coupled and not wants.has_grammar, batch.rows.states
        only_largest = is_coupled and all(state.sampling.reads_largest_logit for state in states)
        verifies = is_coupled and self._group.size == 1 and batch.rows.are_all_sampling
        verifies = verifies and not any(state.sampling.needs_walk for state in states)
        inputs, verification = build_batch(self._table, batch), self._verification(batch) if verifies else None
        number, computed = self._passes.start(
            inputs.token_ids,
            inputs.positions,
            self.runner.attention.plan(inputs.attention),
            inputs.node_places,
            wants.aux_hidden_state_layers,
            only_largest,
            verification,
            inputs.read_lens,
        )
        self._open.add(number)
        return KernelPass(batch, ForwardOutput(*computed, inputs.roots), number, verification)

    def can_begin_after(self, before: Pass) -> bool:
        return self._group.size == 1 and isinstance(before.computed.logits, LargestLogits)

    def begin_after(
        self,
        before: Pass,
        drafted: UnsizedTrees | None,
        draft_limits: Sequence[DraftLimit],  # noqa: ARG002
    ) -> KernelPass:
        assert isinstance(before, KernelPass)
        assert drafted is None
        rows = before.batch.rows
        number, logits = self._passes.begin_after(before.number, self._ops.struct, rows.slots)
        self._open.add(number)
        computed = ForwardOutput(None, logits, [], list(range(len(rows.states))))
        return KernelPass(before.batch.decoding(), computed, number, is_early=True)

    def wait(self, started: Pass) -> None:
        assert isinstance(started, KernelPass)
        self._passes.wait(started.number)
        self._open.discard(started.number)

    def finish(self, started: Pass) -> StepOutcome:
        assert isinstance(started, KernelPass)
        if started.verification is None and not started.is_early:
            return super().finish(started)
        end = time.perf_counter()
        outcome = self._chosen(started) if started.verification is None else started.verification.outcome
        output = StepOutput.of_sampled(VerifyOutput(outcome))
        return StepOutcome(started.batch, output, started.computed, end)

    def _chosen(self, started: KernelPass) -> Tensor:
        """The outcome of trees of one node, from the tokens that the pass chose; appends these to the table."""
        logits, slots = started.computed.logits, started.batch.rows.slots
        assert isinstance(logits, LargestLogits)
        is_finite = (logits.token_ids >= 0).long()
        outcome = torch.stack((is_finite, is_finite, logits.token_ids, torch.zeros_like(is_finite)), 1)
        self._ops.append(slots, outcome)
        return outcome

    def _verification(self, batch: StepBatch) -> Verification:
        """The verification of all rows by the pass."""
        rows, tree = batch.rows, batch.tree
        trees = VerifiedTrees(tree.tokens, tree.parents, tree.num_nodes, tree.max_depth)
        sampling = self._table.sampling(rows.slots, rows.states)
        return Verification.of(self._ops, self.runner.kv.pool, rows.slots, sampling, trees)

    def __del__(self) -> None:
        for number in sorted(self._open):  # before the weights that a pass reads, and the KV that it writes, are freed
            self._passes.wait(number)
