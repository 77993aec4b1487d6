"""Steps as CUDA graphs. What has no graph runs as without them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specray.spec_decode.drafter import UnsizedTrees
from specray.spec_decode.node_sampler import NodeSampler
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.verifier import can_verify_padded
from specray.step import BucketSeconds, DraftLimit
from specray.worker.buckets import Bucket
from specray.worker.decode_graphs import DecodeGraphs
from specray.worker.input_batch import StepBatch
from specray.worker.model_runner import ForwardOutput, ModelRunner
from specray.worker.padded_step import CopiedOutcome
from specray.worker.step_backend import Pass, StepOutcome, StepWants
from specray.worker.torch_backend import TorchBackend


@dataclass(slots=True)
class GraphPass(Pass):
    draft_limits: Sequence[DraftLimit]  # see StepWants
    outcome: CopiedOutcome | None  # None: a graph computed the logits, and they are verified without one


class GraphBackend:
    """`StepBackend` of a worker with graphs; `eager` runs the other steps."""

    def __init__(self, graphs: DecodeGraphs, eager: TorchBackend, table: RequestTable, sampler: NodeSampler) -> None:
        self._graphs, self._eager, self._table, self._sampler = graphs, eager, table, sampler

    @property
    def runner(self) -> ModelRunner:
        return self._eager.runner

    @property
    def starts_passes(self) -> bool:
        return True

    @property
    def compiles_kernels(self) -> bool:
        return True

    def prepare(self) -> None:
        self._graphs.fit_drafter()

    def measure(self) -> list[BucketSeconds]:
        device = self._table.device
        # The stand-in for graphs computes on a CPU, where times say nothing.
        return self._graphs.measure(partial(torch.cuda.synchronize, device)) if device.type == "cuda" else []

    @property
    def knows_tree_sizes(self) -> bool:
        """True if a graph made the last trees, with as many nodes as limits allow, or the device waits for them."""
        return self._graphs.were_drafts_taken or self._graphs.waits_on_device

    def begin(self, batch: StepBatch, wants: StepWants) -> Pass:
        states = [state.sampling for state in batch.rows.states]
        verifies = not wants.has_grammar and can_verify_padded(states, self._sampler)
        if not verifies:
            batch = batch.with_sizes()
        # Only graphs bring states behind drafts that other graphs computed.
        bucket = None
        if verifies or self.runner.states is None:
            bucket = self._graphs.bucket(batch)
        if bucket is None and batch.wait_for_sizes is not None:
            batch = batch.with_sizes()
            bucket = self._graphs.bucket(batch)
        if bucket is None:
            self._graphs.were_drafts_taken = False
            return self._eager.begin(batch, wants)
        computed = self._graphs.forward(batch, bucket, returns_logits=not verifies)
        if not verifies:
            self._graphs.were_drafts_taken = False
            return GraphPass(batch, computed, wants.draft_limits, None)
        return self._verify(batch, computed, bucket, wants.draft_limits)

    def can_begin_after(self, before: Pass) -> bool:
        return isinstance(before, GraphPass) and before.outcome is not None

    def begin_after(self, before: Pass, drafted: UnsizedTrees | None, draft_limits: Sequence[DraftLimit]) -> GraphPass:
        assert isinstance(before, GraphPass)
        assert before.outcome is not None
        self._table.flush()
        batch = before.batch.decoding()
        if drafted is None:
            batch = batch._replace(tree=batch.tree._replace(tokens=before.outcome.first_tokens))
        else:
            batch = batch._replace(
                tree=drafted.tree, num_nodes=drafted.most_nodes, wait_for_sizes=drafted.wait_for_sizes
            )
            self._graphs.were_drafts_taken = True
        bucket = self._graphs.bucket(batch)
        assert bucket is not None, "see `DecodeGraphs.verify`"
        computed = self._graphs.forward(batch, bucket, returns_logits=False)
        return self._verify(batch, computed, bucket, draft_limits)

    def _verify(
        self, batch: StepBatch, computed: ForwardOutput, bucket: Bucket, draft_limits: Sequence[DraftLimit]
    ) -> GraphPass:
        outcome, drafts = self._graphs.verify(batch, bucket, draft_limits)
        return GraphPass(batch, computed, draft_limits, outcome, drafts=drafts)

    def has_ended(self, started: Pass) -> bool:
        return not isinstance(started, GraphPass) or started.outcome is None or started.outcome.is_there

    def wait(self, started: Pass) -> None:
        """The device orders what follows."""

    def finish(self, started: Pass) -> StepOutcome:
        if not isinstance(started, GraphPass) or started.outcome is None:
            return self._eager.finish(started)
        batch = started.batch.with_sizes()
        output = started.outcome.output()
        end = time.perf_counter()
        computed = started.computed._replace(roots=batch.roots)  # of the trees as they were
        return StepOutcome(
            batch, output, computed, end, self._graphs.draft(batch, started.draft_limits, started.drafts)
        )
