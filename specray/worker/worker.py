"""One rank of the target: executes plans and submits the next step's drafts.

`execute` is the whole speculative step, `begin` and `finish` are its halves. A step without drafts may begin before the
one before is finished: its forward pass takes the tokens from that one's. Rank 0 broadcasts the trees and the outcome
of verification; the other ranks run the same code on what they receive, so ranks cannot diverge.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specray.engine.executor import Capacity
from specray.layers.parallel import RankGroup
from specray.models.target_model import TargetModel
from specray.ops.cpu.steps import TableKernels
from specray.ops.cpu.verification import Verification, VerifiedTrees
from specray.ops.likeliest import LargestLogits
from specray.outputs import TokenLogprob
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DraftSource
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.node_sampler import NodeSampler, coupled
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.shard_verifier import verify_shards
from specray.spec_decode.verifier import can_verify_padded, needs_walk, reads_largest_logit, verify, verify_largest
from specray.spec_decode.verify_batch import VerifyInput, VerifyOutput
from specray.step import DraftLimit, RequestResult, StepPlan, StepResult, StepTimes
from specray.step_wire import pack, unpack_plan
from specray.structured_output.matchers import GrammarTable
from specray.worker.broadcast import DraftSizes, broadcast_output, broadcast_tree, follow
from specray.worker.buckets import Bucket
from specray.worker.decode_graphs import DecodeGraphs
from specray.worker.input_batch import ScheduledBatch, StepBatch, build_batch
from specray.worker.model_runner import ForwardOutput, ModelRunner
from specray.worker.prompt_logprobs import compute_prompt_logprobs
from specray.worker.step_output import CopiedOutcome, StepOutput
from specray.worker.traced_trees import with_traces

NO_DRAFTS = DraftLimit(0, 0)
NOT_A_NUMBER = "the model's output for this request is NaN or infinite, so no token can be sampled"


class StartedStep(NamedTuple):
    """A step whose forward pass was started."""

    plan: StepPlan
    batch: StepBatch | None  # None: no row runs
    verifying: Bucket | None  # of the CUDA graph that verifies
    computed: ForwardOutput | None
    outcome: CopiedOutcome | None  # of that graph
    prepare_seconds: float
    start: float  # time of `time.perf_counter` when the forward pass was about to start
    draft_seconds: float
    slots: Sequence[int] = ()  # of all rows, on rank 0
    withheld: Mapping[int, RequestResult] = {}  # of those that do not run, by slot
    follows: bool = False  # it began before the step before it was finished

    @property
    def has_ended(self) -> bool:
        """Whether all its requests ended in the step before, whose result was not there when it began."""
        return self.follows and self.batch is not None and all(state.has_ended for state in self.batch.rows.states)


class Worker:
    """One rank, as `startup` makes it. Rank 0 is driven by `execute` and `propose`, the others by `run_loop`."""

    def __init__(
        self,
        *,
        group: RankGroup,
        runner: ModelRunner,
        table: RequestTable,
        drafts: DraftSource,
        sampler: NodeSampler,
        grammars: GrammarTable,
        graphs: DecodeGraphs | None,
        capacity: Capacity,
    ) -> None:
        """`graphs` None: no step runs in a CUDA graph."""
        self.drafts = drafts
        self.grammars = grammars
        self.capacity = capacity
        self._group = group
        self._runner = runner
        self._table = table
        self._sampler = sampler
        self._graphs = graphs
        self._inference = torch.inference_mode()  # kept, because making one takes longer than entering it
        self._nothing = ProposeContext(table, [])
        self._context = self._nothing
        self._started: deque[StartedStep] = deque()  # and not finished
        self._unread: set[int] = set()  # KV slots of steps in which the drafter was not called
        self._last_end = 0.0  # of a pass, as far as the host has seen it

    @property
    def model(self) -> TargetModel:
        return self._runner.model

    @property
    def starts_passes(self) -> bool:
        """Whether `begin` returns while the forward pass still runs."""
        return self._runner.starts_passes

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: target forward over known tokens and draft trees, verify, keep the accepted path."""
        self.begin(plan)
        return self.finish()

    def begin(self, plan: StepPlan) -> None:
        """Start a step. Its forward pass may still run when this returns.

        Nothing but `finish` may be called then, or `begin` if `can_begin`.
        """
        with self._inference:
            self._started.append(self._follow(plan) if self._started else self._lead(plan))

    @property
    def num_started(self) -> int:
        """Steps that were started and not finished."""
        return len(self._started)

    def can_begin(self, plan: StepPlan) -> bool:
        """Whether `begin` may start this step now, though another one may not be finished.

        Then both decode the same requests without drafts, and the second pass takes the tokens from the first one.
        """
        if not self._started:
            return True
        before, *others = self._started
        if others or self._group.size > 1 or plan.new_requests or plan.freed_slots:
            return False
        batch, computed = before.batch, before.computed
        if batch is None or computed is None or not batch.rows.are_all_sampling:
            return False
        states = batch.rows.states
        if [row.slot for row in plan.rows] != [state.slot for state in states] or any(map(needs_result, states)):
            return False
        if not self._drafts_nothing(before.plan, plan):
            return False
        takes_tokens = computed.number is not None and isinstance(computed.logits, LargestLogits)
        return batch.tree.max_depth == 0 and (before.outcome is not None or takes_tokens)

    def finish(self) -> StepResult:
        """The result of the oldest step that was started."""
        with self._inference:
            return self._finish(self._started.popleft())

    def propose(self) -> None:
        """Draft for the next step; called after `finish`."""
        context, self._context = self._context, self._nothing
        self.drafts.submit(context)

    @torch.inference_mode()
    def run_loop(self) -> None:
        """Run the plans of rank 0 until the group breaks; for ranks above 0."""
        while True:
            self._finish(self._begin(unpack_plan(self._group.broadcast_bytes(None))))

    def close(self) -> None:
        self._group.close()

    def _drafts_nothing(self, *plans: StepPlan) -> bool:
        """Whether these steps neither verify drafts nor make any."""
        return not self.drafts.reads_context or not any(
            plan.runs_drafter or any(row.draft_limit.num_tokens for row in plan.rows) for plan in plans
        )

    def _follow(self, plan: StepPlan) -> StartedStep:
        """Start a step over the tokens that the pass before it chooses. See `can_begin`."""
        start = time.perf_counter()
        before = self._started[-1]
        batch, computed, ops = before.batch, before.computed, self._table.ops
        assert batch is not None
        assert computed is not None
        for row in plan.rows:
            self._table.extend(row.slot, [], row.new_block_ids)
        if self._graphs is not None and before.verifying is not None and before.outcome is not None:
            self._table.flush()
            batch = batch._replace(tree=batch.tree._replace(tokens=before.outcome.first_tokens))
            computed = self._graphs.forward(batch, before.verifying, returns_logits=False)
            outcome = self._graphs.verify(batch, before.verifying, drafts=False)
            return StartedStep(plan, batch, before.verifying, computed, outcome, 0.0, start, 0.0, follows=True)
        assert isinstance(ops, TableKernels)
        if not before.follows:
            batch = batch._replace(rows=batch.rows._replace(num_known=[1] * len(plan.rows)))
        computed = self._runner.follow(computed, ops, batch.rows.slots)
        return StartedStep(plan, batch, None, computed, None, 0.0, start, 0.0, follows=True)

    def _lead(self, plan: StepPlan) -> StartedStep:
        """Start the step on all ranks, without the requests that cannot run."""
        ready, withheld = self._withhold(plan)
        if self._group.size > 1:
            self._group.broadcast_bytes(pack(ready))
        return self._begin(ready)._replace(slots=[row.slot for row in plan.rows], withheld=withheld)

    def _withhold(self, plan: StepPlan) -> tuple[StepPlan, dict[int, RequestResult]]:
        """(the plan without the requests that cannot run, what to report for these, by slot).

        These are requests whose grammar is not compiled yet, and those that ended in a step whose result the scheduler
        did not have when it made the plan.
        """
        withheld: dict[int, RequestResult] = {}
        if self.grammars.slots or any(new.sampling.grammar is not None for new in plan.new_requests):
            plan, withheld = self.grammars.withhold(plan)
        entered = {new.slot for new in plan.new_requests}
        ended = [row.slot for row in plan.rows if row.slot not in entered and self._table.states[row.slot].has_ended]
        if ended:
            withheld |= {slot: _deferred(self._table.states[slot]) for slot in ended}
            plan = plan._replace(rows=[row for row in plan.rows if row.slot not in withheld])
        return plan, withheld

    def _begin(self, plan: StepPlan) -> StartedStep:
        """Start the step on this rank: collect the drafts and start the forward pass."""
        start = time.perf_counter()
        rows = ScheduledBatch.of(self._table, plan)
        self.drafts.release(plan.freed_slots)
        self._context = self._nothing  # the last step's may name slots that were just freed
        if not rows.states:
            prepared = time.perf_counter()
            return StartedStep(plan, None, None, None, None, prepared - start, prepared, 0.0)
        states = [state.sampling for state in rows.states]
        # Rank 0 alone knows a grammar's mask, and all ranks must choose the same graphs.
        has_grammar = any(state.options.grammar is not None for state in states)
        can_replay = not has_grammar and can_verify_padded(states, self._sampler)
        batch = self._collect(plan, rows, can_replay)
        draft_seconds = self.drafts.seconds
        prepared = time.perf_counter()
        bucket = self._graphs.bucket(batch) if self._graphs is not None else None
        if self._graphs is not None and bucket is None and batch.unread is not None:
            batch = self._read(batch)
            bucket = self._graphs.bucket(batch)
        verifying = bucket if can_replay else None
        is_coupled = not has_grammar and self._sampler is coupled
        only_largest = is_coupled and all(map(reads_largest_logit, states))
        layers = self.drafts.aux_hidden_state_layers if plan.runs_drafter and self._group.leads else ()
        if self._graphs is not None and bucket is not None:
            computed = self._graphs.forward(batch, bucket, returns_logits=verifying is None)
        else:
            verification = self._verification(batch) if is_coupled and can_replay else None
            computed = self._runner.start(build_batch(self._table, batch), layers, only_largest, verification)
        outcome = None
        if self._graphs is not None and verifying is None:
            self._graphs.were_drafts_taken = False
        elif self._graphs is not None and verifying is not None:
            may_draft = plan.runs_drafter and all(row.draft_limit.allows_drafts for row in plan.rows)
            outcome = self._graphs.verify(batch, verifying, may_draft)
        return StartedStep(plan, batch, verifying, computed, outcome, prepared - start, prepared, draft_seconds)

    def _finish(self, started: StartedStep) -> StepResult:
        """The rest of the step on this rank: verify and commit, and prepare the next drafts' input."""
        plan, batch, verifying, computed, outcome, prepare_seconds, start, draft_seconds, *_ = started
        slots, withheld = started.slots, started.withheld
        if batch is None or computed is None:
            times = StepTimes(prepare_seconds, 0.0, 0.0, 0.0)
            return StepResult(plan.step_id, [withheld[slot] for slot in slots], times)
        self._runner.wait(computed)
        waited = time.perf_counter()
        # A pass that follows another one begins when that one ends. Its time includes what the host did meanwhile.
        forward_seconds = waited - max(start, self._last_end)
        rows = batch.rows
        if started.has_ended:
            self._last_end = waited
            times = StepTimes(prepare_seconds, forward_seconds, 0.0, draft_seconds)
            return StepResult(plan.step_id, [_deferred(state) for state in rows.states], times)
        batch = self._read(batch)
        forwarded = time.perf_counter()
        prepare_seconds += forwarded - waited
        prompts: dict[int, list[TokenLogprob]] = {}
        # Steps in graphs have no hidden states, and compute no token of a prompt but its last.
        if computed.hidden is not None and any(state.prompt_logprobs for state in rows.states):
            prompts = compute_prompt_logprobs(self.model, batch, computed.hidden)
        output = self._verify(batch, computed) if outcome is None else outcome.output()
        self._last_end = waited if outcome is None else time.perf_counter()
        starts = [state.num_computed_tokens for state in rows.states] if not plan.runs_drafter else []
        results = [self._commit_row(batch, output, row, prompts.get(row)) for row in range(len(rows.states))]
        for row, scores in enumerate(self.drafts.scores):
            if not results[row].is_deferred:
                results[row] = results[row]._replace(draft_scores=scores)
        if any(state.traces_drafts for state in rows.states):
            results = with_traces(results, batch, output)
        if plan.runs_drafter and self.drafts.reads_context:
            replay = None if self._graphs is None or verifying is None else self._graphs.draft(batch, verifying)
            took_part = [not result.is_deferred for result in results]
            self._context = self._draft_context(plan, batch, output, computed, took_part, replay)
        elif self.drafts.reads_context:
            for state, first in zip(rows.states, starts, strict=True):
                written = self._table.host_kv_slots[state.slot, first : state.num_computed_tokens]
                self._unread.update(written.tolist())
        if withheld:
            ready = iter(results)
            results = [withheld.get(slot) or next(ready) for slot in slots]
        verified = time.perf_counter()
        times = StepTimes(prepare_seconds, forward_seconds, verified - forwarded, draft_seconds)
        uses, faults = self.drafts.take_uses(), self.drafts.take_faults()
        return StepResult(plan.step_id, results, times, faults, uses, self.drafts.take_is_new())

    def _collect(self, plan: StepPlan, rows: ScheduledBatch, can_replay: bool) -> StepBatch:
        """The draft trees of the rows that sample, and what grammars allow at their nodes.

        `can_replay`: a graph may verify them. Then it can be launched before the drafter is done.
        """
        tree, num_nodes, mask = None, None, None
        if self._group.leads:
            sampling = set(rows.sampling)
            draft_limits = [row.draft_limit if place in sampling else NO_DRAFTS for place, row in enumerate(plan.rows)]
            if can_replay and isinstance(self.drafts, InlineDrafts) and self._have_known_sizes(rows, draft_limits):
                taken = self.drafts.take(rows.slots, rows.roots, draft_limits)
                return StepBatch(rows, taken.tree, taken.most_nodes, None, taken)
            tree, num_nodes = self.drafts.collect(rows.slots, rows.roots, draft_limits)
            if self.grammars.slots:
                slots = [state.slot for state in rows.states]
                tree, num_nodes, mask = self.grammars.constrain(slots, rows.sampling, tree, num_nodes, draft_limits)
        if self._group.size > 1:
            sizes, device = DraftSizes.of(self.drafts), self._table.device
            tree, num_nodes, sizes = broadcast_tree(self._group, tree, num_nodes, sizes, device)
            follow(self.drafts, sizes)
        assert tree is not None
        assert num_nodes is not None
        return StepBatch(rows, tree, num_nodes, mask)

    def _have_known_sizes(self, rows: ScheduledBatch, draft_limits: Sequence[DraftLimit]) -> bool:
        """Whether it is known without the drafter how many nodes the trees of decoding rows have."""
        if self._graphs is None or not self._graphs.were_drafts_taken or self._group.size > 1 or self.grammars.slots:
            return False
        are_decoding = rows.are_all_sampling and max(rows.num_known) == 1
        return are_decoding and not any(limit.min_score for limit in draft_limits)

    def _read(self, batch: StepBatch) -> StepBatch:
        """With the trees' numbers of nodes."""
        if batch.unread is None:
            return batch
        assert isinstance(self.drafts, InlineDrafts)
        tree, num_nodes = self.drafts.read(batch.unread)
        return batch._replace(tree=tree, num_nodes=num_nodes, unread=None)

    def _verification(self, batch: StepBatch) -> Verification | None:
        """The verification of a step by its pass; None if that cannot verify, or not all rows."""
        ops, rows, tree = self._table.ops, batch.rows, batch.tree
        if not self._runner.can_verify or self._group.size > 1 or not rows.are_all_sampling:
            return None
        assert isinstance(ops, TableKernels)
        trees = VerifiedTrees(tree.tokens, tree.parents, tree.num_nodes, tree.max_depth)
        sampling = self._table.sampling(rows.slots, rows.states)
        return Verification.of(ops, self._runner.kv.pool, rows.slots, sampling, trees)

    def _verify(self, batch: StepBatch, computed: ForwardOutput) -> StepOutput:
        """Verify the trees without a graph, and keep the accepted paths, unless the pass did so."""
        if computed.verification is not None:
            return StepOutput.of_sampled(VerifyOutput(computed.verification.outcome))
        output = self._verify_eagerly(batch, computed)
        self._commit(batch, output)
        return output

    def _verify_eagerly(self, batch: StepBatch, computed: ForwardOutput) -> StepOutput:
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
            verified = verify_largest(logits, tree)
        elif states:
            assert isinstance(logits, Tensor)
            inputs = VerifyInput(logits, tree, num_nodes, self._table.sampling(slots, states), lengths)
            if self._group.size > 1:
                verified = verify_shards(inputs, self.model.head, self._sampler, batch.mask)
            else:
                verified = verify(inputs, self._sampler, batch.mask)
        if self._group.leads:
            if sampling is None:
                assert verified is not None
                output = StepOutput.of_sampled(verified)
            else:
                assert computed.hidden is not None
                roots = self._table.numbers(computed.roots)
                is_finite = computed.hidden.index_select(0, roots).isfinite().all(-1)
                output = StepOutput.of(is_finite, sampling, rows.sampling, verified)
        if self._group.size > 1:
            output = broadcast_output(self._group, output, self._table.device)
        assert output is not None
        return output

    def _commit(self, batch: StepBatch, output: StepOutput) -> None:
        """Keep the accepted paths on the device: KV and tokens."""
        rows, tree = batch.rows, batch.tree
        if tree.max_depth:
            kv_slots = self._table.ops.kv_slots(rows.slots, rows.last, tree.tokens.shape[1])
            self._runner.kv.commit(kv_slots, output.device)
        self._table.ops.append(rows.slots, output.device)

    def _commit_row(
        self, batch: StepBatch, output: StepOutput, row: int, prompt_logprobs: list[TokenLogprob] | None
    ) -> RequestResult:
        """Keep a row's accepted path in the host's copy: lengths and tokens."""
        state, num_kept = batch.rows.states[row], output.num_kept(row)
        if state.has_ended:
            return _deferred(state)
        if not num_kept:
            state.has_ended = True
            return RequestResult(state.slot, [], 0, None, self.grammars.error(state.slot) or NOT_A_NUMBER)
        tokens = output.emitted(row)
        if self.grammars.slots:
            self.grammars.accept(state.slot, tokens)
        state.num_computed_tokens += batch.rows.num_known[row] + num_kept - 1
        state.has_ended = state.sampling.end_with(tokens, len(state.token_ids) - state.num_prompt_tokens)
        state.token_ids += tokens
        state.sampling.num_output_tokens = len(state.token_ids) - state.num_prompt_tokens
        num_drafts, nodes = batch.num_nodes[row] - 1, output.accepted_nodes(row)
        return RequestResult(state.slot, tokens, num_drafts, output.logprobs.get(row), None, nodes, prompt_logprobs)

    def _draft_context(
        self,
        plan: StepPlan,
        batch: StepBatch,
        output: StepOutput,
        computed: ForwardOutput,
        took_part: Sequence[bool],
        replay: Callable[[], DraftTree] | None,
    ) -> ProposeContext:
        """The drafter's input: rows with finite logits, and the hidden states of the tokens they committed.

        `took_part`: rows that had not ended before the step.
        """
        rows, sampling = batch.rows, set(batch.rows.sampling)
        drafting: list[DraftRequest] = []
        others: list[DraftRequest] = []
        places: list[int] = []  # of the committed tokens of `drafting` among the step's, in order
        other_places: list[int] = []
        counts = batch.num_nodes
        roots = computed.roots or [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
        for row, (state, root) in enumerate(zip(rows.states, roots, strict=True)):
            if not output.num_kept(row) or not took_part[row]:
                continue
            limit = plan.rows[row].draft_limit
            num_before, end = rows.num_known[row] - 1, state.num_computed_tokens
            # A graph drafts for all rows or none.
            gets_drafts = row in sampling and limit.allows_drafts and (replay is not None or not state.has_ended)
            committed = [*range(root - num_before, root + 1), *(root + node for node in output.accepted_nodes(row))]
            (drafting if gets_drafts else others).append(
                DraftRequest(state.slot, end - len(committed), end, useful(limit))
            )
            (places if gets_drafts else other_places).extend(committed)

        def gather() -> Tensor:
            index = self._table.numbers(places + other_places)
            parts = [states.index_select(0, index) for states in computed.aux_hidden_states]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

        unread, self._unread = self._unread, set()
        return ProposeContext(
            self._table,
            drafting,
            others,
            gather if computed.aux_hidden_states else None,
            unread,
            replay if len(drafting) == len(rows.states) else None,
        )


def needs_result(state: RequestState) -> bool:
    """Whether a request's next step cannot begin before the host has the result of this one."""
    return state.has_ended or state.traces_drafts or needs_walk(state.sampling)


def useful(limit: DraftLimit) -> DraftLimit:
    """The limit without levels that no tree has: one of n nodes has n at most."""
    return DraftLimit(limit.num_tokens, min(limit.num_tokens, limit.num_steps))


def _deferred(state: RequestState) -> RequestResult:
    """The result of a request that took no part in a step, or ended before it."""
    return RequestResult(state.slot, [], 0, None, None, is_deferred=True)
