"""Steps by torch's operations and Triton's: the reference, on any device."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specray.layers.parallel import RankGroup
from specray.ops.step_tensors import LargestLogits
from specray.spec_decode.drafter import UnsizedTrees
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.shard_verifier import verify_shards
from specray.spec_decode.step_ops import step_ops
from specray.spec_decode.verifier import verify
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput
from specray.step import BucketSeconds, DraftLimit
from specray.worker.broadcast import broadcast_output
from specray.worker.input_batch import StepBatch, build_batch
from specray.worker.model_runner import ForwardOutput, ModelRunner
from specray.worker.step_backend import Pass, StepOutcome, StepWants
from specray.worker.step_output import StepOutput


class TorchBackend:
    """torch's operations, on any device: the specification of the others."""

    knows_tree_sizes = False

    def __init__(self, runner: ModelRunner, table: RequestTable, group: RankGroup, sampler: NodeSampler) -> None:
        self.runner = runner
        self.starts_passes = table.device.type != "cpu"  # launches return before the device is done
        self.compiles_kernels = table.device.type != "cpu"
        self._table, self._group, self._sampler = table, group, sampler

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def measure(self) -> list[BucketSeconds]:
        return []

    def begin(self, batch: StepBatch, wants: StepWants) -> Pass:
        batch = batch.with_sizes()
        layers, is_coupled = wants.aux_hidden_state_layers, self._sampler is coupled and not wants.has_grammar
        only_largest = is_coupled and all(state.sampling.reads_largest_logit for state in batch.rows.states)
        if self.runner.states is not None:
            self.runner.states.start(batch)
        return Pass(batch, self.runner.run(build_batch(self._table, batch), layers, only_largest))

    def can_begin_after(self, before: Pass) -> bool:  # noqa: ARG002
        return False

    def begin_after(
        self,
        before: Pass,  # noqa: ARG002
        drafted: UnsizedTrees | None,  # noqa: ARG002
        draft_limits: Sequence[DraftLimit],  # noqa: ARG002
    ) -> Pass:
        raise AssertionError("can_begin_after is False")

    def has_ended(self, started: Pass) -> bool:  # noqa: ARG002
        return True

    def wait(self, started: Pass) -> None:
        """The pass has ended, or the device orders what follows."""

    def finish(self, started: Pass) -> StepOutcome:
        end = time.perf_counter()
        output = self._verify(started.batch, started.computed)
        self._commit(started.batch, output)
        return StepOutcome(started.batch, output, started.computed, end)

    def _verify(self, batch: StepBatch, computed: ForwardOutput) -> StepOutput:
        """Verify the trees of the rows that sample. The outcome of all rows is copied to the host once."""
        rows, output, verified = batch.rows, None, None
        states, num_nodes, tree = rows.states, batch.num_nodes, batch.tree
        slots, lengths, sampling = rows.slots, rows.lengths, None
        if not rows.are_all_sampling:
            sampling = torch.tensor(rows.sampling, dtype=torch.int64).to(self._table.device)
            states, num_nodes = [states[row] for row in rows.sampling], [num_nodes[row] for row in rows.sampling]
            slots, lengths, tree = slots[sampling], lengths[sampling], tree.select(sampling)
        logits = computed.logits
        if states and isinstance(logits, LargestLogits):
            verified = step_ops(self._table.device).verify_chosen(logits.token_ids, tree)
        elif states:
            assert isinstance(logits, Tensor)
            inputs = VerifyInput(logits, tree, num_nodes, self._table.sampling(slots, states), lengths)
            if self._group.size > 1:
                verified = verify_shards(inputs, self.runner.model.head, self._sampler, batch.mask)
            else:
                verified = verify(inputs, self._sampler, batch.mask)
        if self._group.leads:
            output = self._output(batch, computed, sampling, verified)
        if self._group.size > 1:
            output = broadcast_output(self._group, output, self._table.device)
        assert output is not None
        return output

    def _output(
        self, batch: StepBatch, computed: ForwardOutput, sampling: Tensor | None, verified: VerifyOutput | None
    ) -> StepOutput:
        if sampling is None:
            assert verified is not None
            return StepOutput.of_sampled(verified)
        assert computed.hidden is not None
        roots = self._table.numbers(computed.roots)
        is_finite = computed.hidden.index_select(0, roots).isfinite().all(-1)
        return StepOutput.of(is_finite, sampling, batch.rows.sampling, verified)

    def _commit(self, batch: StepBatch, output: StepOutput) -> None:
        """Keep the accepted paths on the device: KV, states and tokens."""
        rows, tree = batch.rows, batch.tree
        if tree.max_depth:
            kv_slots = self._table.ops.kv_slots(rows.slots, rows.last, tree.tokens.shape[1])
            self.runner.kv.commit(kv_slots, output.device)
            if self.runner.states is not None:
                self.runner.states.commit([output.accepted_nodes(row) for row in range(len(rows.states))])
        self._table.ops.append(rows.slots, output.device)
