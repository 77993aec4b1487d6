"""The CUDA graphs of decode steps, by bucket, and which steps have one.

Steps with prompt tokens have none, nor have steps with so many nodes that the device takes longer than the host's
launches.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import product

import torch

from specray.ops.graphs import Graphs
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DeviceDrafter, DraftSource, EarlyStep
from specray.spec_decode.node_sampler import NodeSampler
from specray.spec_decode.pending_trees import limited
from specray.spec_decode.propose_context import DraftRequest
from specray.spec_decode.request_table import RequestTable
from specray.step import BucketSeconds, DraftLimit
from specray.worker.buckets import Bucket, buckets, draft_buckets, node_buckets, smallest_bucket
from specray.worker.draft_context import useful_limit
from specray.worker.input_batch import StepBatch
from specray.worker.model_runner import ForwardOutput, ModelRunner
from specray.worker.padded_step import CopiedOutcome, PaddedStep

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Graphs for up to `max_rows` requests and the trees of `drafts`: none until `fit_drafter` captures them.

    A drafter of another process may be replaced later. If the new one drafts larger trees, or reads the target's hidden
    states at other layers, all graphs are captured again before the next step.
    """

    def __init__(
        self,
        graphs: Graphs,
        runner: ModelRunner,
        table: RequestTable,
        drafts: DraftSource,
        max_rows: int,
        drafter: DeviceDrafter | None,
        sampler: NodeSampler,
        goes_on: bool = True,
    ) -> None:
        """`drafter` is the one of `drafts`, if graphs can have its work too.

        `goes_on`: the device may draft before the host has the outcome. Ranks must agree on what it does then, so it
        is False where they all draft, but not alike.
        """
        self._graphs, self._runner, self._table, self._drafts = graphs, runner, table, drafts
        self._drafter, self._sampler = drafter, sampler
        self._max_rows, self._may_go_on = max_rows, goes_on
        # Whether the trees of the next step are those of a graph, so that they mostly have the nodes that limits allow.
        self.were_drafts_taken = False
        self._max_nodes, self._layers = 0, tuple[int, ...]()  # that graphs were captured for
        self._buckets: list[Bucket] = []
        self._draft_buckets: list[Bucket] = []

    @property
    def waits_on_device(self) -> bool:
        """See DraftSource."""
        return self._drafts.waits_on_device

    def fit_drafter(self) -> None:
        """Capture all graphs, unless those that there are fit the trees and hidden states of the drafter.

        Several ranks must call it together, because the collectives of their graphs run before they are captured.
        """
        nodes, layers = 1 + self._drafts.max_draft_tokens, self._drafts.aux_hidden_state_layers
        if nodes > self._max_nodes or (layers and layers != self._layers):
            self._max_nodes, self._layers = max(nodes, self._max_nodes), layers or self._layers
            self._capture_all()

    @torch.inference_mode()
    def measure(self, wait: Callable[[], object]) -> list[BucketSeconds]:
        """What the buckets' graphs take, of requests without context; `wait` waits for the device.

        Several ranks must call it together.
        """
        self._step.clear()
        times = {
            bucket: self._seconds([("forward", bucket), ("verify", bucket, False, False)], wait)
            for bucket in self._buckets
        }
        plain = [bucket for bucket in self._buckets if bucket.nodes == 1]
        found = []
        for bucket in [*self._draft_buckets, *plain]:  # steps of equal trees
            taken = smallest_bucket(self._buckets, bucket.rows, bucket.nodes, bucket.tokens)
            assert taken is not None
            drafting = self._seconds([("draft", bucket, False)], wait)
            found.append(BucketSeconds(bucket.rows, bucket.nodes, times[taken], drafting))
        return found

    def bucket(self, batch: StepBatch) -> Bucket | None:
        """The smallest bucket for a step; None: no graph."""
        if not batch.rows.only_decode:
            return None
        self.fit_drafter()
        return smallest_bucket(self._buckets, len(batch.num_nodes), max(batch.num_nodes), sum(batch.num_nodes))

    def forward(self, batch: StepBatch, bucket: Bucket, returns_logits: bool) -> ForwardOutput:
        """The target over a step's trees."""
        self._step.load(batch)
        self._graphs.replay(("forward", bucket))
        return ForwardOutput(
            None,
            self._step.logits(sum(batch.num_nodes)) if returns_logits else None,
            self._step.aux_hidden_states(bucket) if self._drafts.aux_hidden_state_layers else [],
            batch.roots,
        )

    def verify(
        self, batch: StepBatch, bucket: Bucket, draft_limits: Sequence[DraftLimit]
    ) -> tuple[CopiedOutcome, DraftTree | None]:
        """Verify the trees of the last `forward` and keep the accepted paths.

        `draft_limits`: see StepWants. The trees are those of the next step, if they are made without the host and a
        bucket holds them.
        """
        is_filtered = self._step.is_sharded and _is_filtered(batch)
        self._graphs.replay(("verify", bucket, _is_sampled(batch), is_filtered))
        outcome = self._step.outcome(len(batch.num_nodes))
        goes_on = self._may_go_on and draft_limits and not _has_predictions(batch)
        drafts = self._draft_early(batch, draft_limits) if goes_on else None
        self.were_drafts_taken = False
        return outcome, drafts

    def _draft_early(self, batch: StepBatch, draft_limits: Sequence[DraftLimit]) -> DraftTree | None:
        """Go on with the trees after this step, if those before were taken; nobody has to take them."""
        count, whole = len(batch.num_nodes), 1 + self._drafts.max_draft_tokens
        if self.waits_on_device:
            # The host will not know how many nodes of whole trees these are.
            if smallest_bucket(self._buckets, count, whole, count * whole) is None:
                return None
            width = next(size for size in node_buckets(self._max_nodes) if size >= max(batch.num_nodes))
            outcome = self._step.device_outcome(count, width)
            gather = partial(self._step.kept_states, count, width) if self._drafts.aux_hidden_state_layers else None
            pairs = zip(batch.rows.states, draft_limits, strict=True)
            requests = [DraftRequest(state.slot, 0, 0, useful_limit(limit)) for state, limit in pairs]
            return self._drafts.draft_early(EarlyStep(requests, outcome, gather))
        if not self.were_drafts_taken or (bucket := self._draft_bucket(batch, draft_limits)) is None:
            return None
        return limited(self._drafted(batch, bucket), draft_limits)

    def draft(
        self, batch: StepBatch, draft_limits: Sequence[DraftLimit], drafts: DraftTree | None
    ) -> Callable[[], DraftTree] | None:
        """What drafts for the next step after `verify`, which returned `drafts`; None if no graph does."""
        bucket = self._draft_bucket(batch, draft_limits)
        if drafts is None and (bucket is None or _has_predictions(batch)):
            return None
        return lambda: self._take_drafts(batch, bucket, drafts)

    def _take_drafts(self, batch: StepBatch, bucket: Bucket | None, drafts: DraftTree | None) -> DraftTree:
        self.were_drafts_taken = True
        if drafts is not None:
            return drafts
        assert bucket is not None
        return self._drafted(batch, bucket)

    def _draft_bucket(self, batch: StepBatch, draft_limits: Sequence[DraftLimit]) -> Bucket | None:
        """That of the graph which drafts after a step; None: no graph does, or some requests get no drafts."""
        if self._drafter is None or not draft_limits:
            return None
        drafted = min(1 + max(limit.num_tokens for limit in draft_limits), self._max_nodes)
        sizes = len(batch.num_nodes), max(batch.num_nodes)
        return smallest_bucket(self._draft_buckets, *sizes, drafted=drafted)

    def _drafted(self, batch: StepBatch, bucket: Bucket) -> DraftTree:
        self._graphs.replay(("draft", bucket, _is_sampled(batch)))
        return self._step.drafts(bucket, len(batch.num_nodes))

    def _seconds(self, keys: Sequence[Hashable], wait: Callable[[], object]) -> float:
        """The shorter of two times of these graphs, of which there may be none."""
        known, times = [key for key in keys if key in self._graphs], list[float]()
        for _ in range(2 if known else 0):
            wait()
            start = time.perf_counter()
            for key in known:
                self._graphs.replay(key)
            wait()
            times.append(time.perf_counter() - start)
        return min(times, default=0.0)

    @torch.inference_mode()
    def _capture_all(self) -> None:
        start = time.perf_counter()
        if self._buckets:  # those of another drafter; several drafters in this process have graphs too
            self._graphs.clear()
        self._buckets = buckets(self._max_rows, self._max_nodes)
        self._draft_buckets = draft_buckets(self._max_rows, self._max_nodes)
        logger.info("capturing CUDA graphs of %d buckets, up to %s", len(self._buckets), self._buckets[0])
        self._step = PaddedStep(self._runner, self._table, self._buckets, self._layers, self._sampler)
        self._step.clear()  # a run before the capture then changes no request
        for bucket in self._buckets:
            self._capture(bucket)
        if self._drafter is not None:
            for bucket, is_sampled in product(self._draft_buckets, (False, True)):
                draft = partial(self._step.draft, bucket, self._drafter, is_sampled)
                self._graphs.capture(("draft", bucket, is_sampled), draft)
        logger.info("captured CUDA graphs in %.1f s", time.perf_counter() - start)

    def _capture(self, bucket: Bucket) -> None:
        step = self._step
        self._graphs.capture(("forward", bucket), lambda: step.forward(bucket))
        kinds = [(False, False), (True, False)]  # of requests: some are sampled; some of these have filters
        if step.is_sharded:
            kinds.append((True, True))
        for kind in kinds:
            self._graphs.capture(("verify", bucket, *kind), partial(step.verify, bucket, *kind))


def _has_predictions(batch: StepBatch) -> bool:
    """Then the host makes chains of predicted tokens, which may be longer than the paths that a graph reads."""
    return any(state.predicted_token_ids for state in batch.rows.states)


def _is_sampled(batch: StepBatch) -> bool:
    return any(state.sampling.is_sampled for state in batch.rows.states)


def _is_filtered(batch: StepBatch) -> bool:
    return any(state.sampling.is_sampled and state.sampling.is_filtered for state in batch.rows.states)
