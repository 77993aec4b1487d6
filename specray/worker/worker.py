"""The steps of a rank of the target, from the plan to the drafts of the next one.

`execute` is a whole step: `begin` collects the trees and starts the target's pass over them, `finish` verifies them and
keeps the accepted paths; `propose` then drafts for the next step. A step may begin early, before the one before is
finished: its forward pass takes the tokens, and the trees that a graph drafted, from the device. `rank_worker` has what
several ranks do beside it.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from specray.engine.executor import Capacity
from specray.layers.parallel import RankGroup
from specray.models.target_model import TargetModel
from specray.outputs import TokenLogprob
from specray.spec_decode.drafter import DraftSource
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RequestTable
from specray.step import BucketSeconds, DraftLimit, RequestResult, StepPlan, StepResult, StepTimes
from specray.structured_output.matchers import GrammarTable
from specray.worker.broadcast import share_drafted, share_trees
from specray.worker.draft_context import draft_context
from specray.worker.input_batch import ScheduledBatch, StepBatch
from specray.worker.no_token import why_no_token
from specray.worker.prompt_logprobs import compute_prompt_logprobs
from specray.worker.step_backend import Pass, StepBackend, StepOutcome, StepWants
from specray.worker.step_output import StepOutput

NO_DRAFTS = DraftLimit(0, 0)


class StartedStep(NamedTuple):
    """A step whose pass was started."""

    plan: StepPlan
    started: Pass | None  # None: no row runs
    prepare_seconds: float
    start: float  # time of `time.perf_counter` when the pass was about to start
    draft_seconds: float
    deferred: Mapping[int, RequestResult] = MappingProxyType({})  # results of requests that do not run, by slot
    slots: Sequence[int] = ()  # of all requests, in order, if some do not run
    is_early: bool = False  # it began before the step before it was finished
    are_drafts_taken: bool = False  # by the next step, which began early

    @property
    def has_ended(self) -> bool:
        """Whether all its requests ended in the step before, whose result was not there when it began."""
        return self.is_early and self.started is not None and all(s.has_ended for s in self.started.batch.rows.states)


class Worker:
    """A rank, as `startup` makes it: the only one, or see `RankWorker`. It is driven by `execute` and `propose`."""

    def __init__(
        self,
        *,
        group: RankGroup,
        backend: StepBackend,
        table: RequestTable,
        drafts: DraftSource,
        grammars: GrammarTable,
        capacity: Capacity,
        shares_trees: bool = False,
    ) -> None:
        """`shares_trees`: the trees of all ranks are rank 0's, because their own ones may not be equal."""
        self.backend, self.drafts, self.grammars, self.capacity = backend, drafts, grammars, capacity
        self._group, self._shares_trees, self._table = group, shares_trees, table
        self.bucket_seconds: list[BucketSeconds] = []  # to be reported with the next result
        self._inference = torch.inference_mode()  # kept, because making one takes longer than entering it
        self._started: deque[StartedStep] = deque()  # and not finished
        self._nothing = ProposeContext(table, [])
        self._context = self._nothing
        self._missed: set[int] = set()  # KV slots of steps in which the drafter was not called
        self._last_end = 0.0  # of a pass, as far as the host has seen it

    @property
    def model(self) -> TargetModel:
        return self.backend.runner.model

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which gets the plans."""
        return self._group.leads

    @property
    def num_started(self) -> int:
        """Steps that were started and not finished."""
        return len(self._started)

    def prepare(self) -> None:
        """Capture CUDA graphs for the trees of the drafter; all ranks call it together."""
        self.backend.prepare()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: target forward over known tokens and draft trees, verify, keep the accepted path."""
        self.begin(plan)
        return self.finish()

    def can_begin(self, plan: StepPlan) -> bool:
        """Whether `begin` may start this step now, though another one may not be finished.

        Both must decode the same requests, because the second pass takes the tokens from the first one. It has no
        drafts, or those that the device made after the first one.
        """
        if not self._started:
            return True
        before, started = self._started[0].plan, self._started[0].started
        if len(self._started) > 1 or started is None or plan.new_requests or plan.freed_slots:
            return False
        if any(row.state_copies for row in plan.rows):  # the host says how far behind its first token each one is
            return False
        states = started.batch.rows.states
        if [row.slot for row in plan.rows] != [state.slot for state in states] or any(map(_needs_result, states)):
            return False
        cuts = any(row.draft_limit.min_score for row in plan.rows)  # the host cuts trees by scores
        has_drafts = started.drafts is not None and not cuts
        is_plain = started.batch.tree.max_depth == 0 and not (self._has_drafts(before) or self._has_drafts(plan))
        allows_it = (has_drafts or is_plain) and started.batch.rows.are_all_sampling
        return allows_it and self.backend.can_begin_after(started)

    def begin(self, plan: StepPlan) -> None:
        """Start a step. Its forward pass may still run when this returns.

        Nothing but `finish` may be called then, or `begin` if `can_begin`.
        """
        with self._inference:
            if self._started:
                self._begin_early(plan)
                return
            ready, deferred = self._without_deferred(plan)
            self._begin(ready)
            if deferred:
                slots = [row.slot for row in plan.rows]
                self._started[-1] = self._started[-1]._replace(slots=slots, deferred=deferred)

    def has_result(self) -> bool:
        """Whether `finish` would return at once."""
        started = self._started[0].started
        return started is None or self.backend.has_ended(started)

    def finish(self) -> StepResult:
        """The result of the oldest step that was started: its trees are verified, and the accepted paths are kept."""
        with self._inference:
            return self._finish()

    def propose(self) -> None:
        """Draft for the next step; called after `finish`."""
        context, self._context = self._context, self._nothing
        self.drafts.submit(context)

    def close(self) -> None:
        self._group.close()

    def _without_deferred(self, plan: StepPlan) -> tuple[StepPlan, dict[int, RequestResult]]:
        """(the plan without the requests that cannot run, what to report for these, by slot).

        These are requests whose grammar is not compiled yet, and those that ended in a step whose result the scheduler
        did not have when it made the plan.
        """
        deferred: dict[int, RequestResult] = {}
        if self.grammars.slots or any(new.sampling.grammar is not None for new in plan.new_requests):
            plan, deferred = self.grammars.defer(plan)
        entered = {new.slot for new in plan.new_requests}
        ended = [row.slot for row in plan.rows if row.slot not in entered and self._table.states[row.slot].has_ended]
        if ended:
            deferred |= {slot: _deferred_result(self._table.states[slot]) for slot in ended}
            plan = plan._replace(rows=[row for row in plan.rows if row.slot not in deferred])
        return plan, deferred

    def _begin(self, plan: StepPlan) -> None:
        """Start the step on this rank: collect the drafts and start the forward pass."""
        start = time.perf_counter()
        rows = ScheduledBatch.of(self._table, plan)
        if (states := self.backend.runner.states) is not None:
            states.enter(plan.new_requests)
        if plan.freed_slots:
            self.drafts.release(plan.freed_slots)
        self._context = self._nothing  # the last step's may name slots that were just freed
        batch = self._collect(plan, rows) if rows.states else None
        draft_seconds = 0.0 if batch is None else self.drafts.seconds
        prepared = time.perf_counter()
        layers = self.drafts.aux_hidden_state_layers if self._is_read(plan) else ()
        wants = StepWants(layers, rows.has_grammar, self._draft_limits(plan))
        started = None if batch is None else self.backend.begin(batch, wants)
        self._started.append(StartedStep(plan, started, prepared - start, prepared, draft_seconds))

    def _begin_early(self, plan: StepPlan) -> None:
        """Start a step over the tokens that the pass before it chooses; see `can_begin`."""
        start, last, drafted = time.perf_counter(), self._started[-1], None
        before = last.started
        assert before is not None
        for row in plan.rows:
            self._table.extend(row.slot, [], row.new_block_ids)
        if before.drafts is not None:
            slots, limits = before.batch.rows.slots, [row.draft_limit for row in plan.rows]
            drafted = self.drafts.take_next(before.drafts, slots, self._table.last_tokens(slots), limits)
            self._started[-1] = last._replace(are_drafts_taken=True)
        if self._shares_trees:
            drafted = share_drafted(self._group, self.drafts, drafted, before.batch.tree)
        started = self.backend.begin_after(before, drafted, self._draft_limits(plan))
        self._started.append(StartedStep(plan, started, 0.0, start, 0.0, is_early=True))

    def _has_drafts(self, plan: StepPlan) -> bool:
        """Whether a step may verify drafts or make some."""
        limits_allow = plan.runs_drafter or any(row.draft_limit.num_tokens for row in plan.rows)
        return limits_allow and self.drafts.reads_context

    def _is_read(self, plan: StepPlan) -> bool:
        """Whether the drafter reads what this step commits."""
        return plan.runs_drafter and self.drafts.reads_context

    def _draft_limits(self, plan: StepPlan) -> list[DraftLimit]:
        """See StepWants."""
        limits = [row.draft_limit for row in plan.rows]
        return limits if self._is_read(plan) and all(limit.num_tokens and limit.num_steps for limit in limits) else []

    def _collect(self, plan: StepPlan, rows: ScheduledBatch) -> StepBatch:
        """The draft trees of the rows that sample, and what grammars, which rank 0 alone has, allow at their nodes."""
        sampling, mask = set(rows.sampling), None
        limits = [row.draft_limit if place in sampling else NO_DRAFTS for place, row in enumerate(plan.rows)]
        if self._have_known_sizes(rows, limits):
            unsized = self.drafts.take_unsized(rows.slots, rows.roots, limits)
            if unsized is not None:
                return StepBatch(rows, unsized.tree, unsized.most_nodes, None, unsized.wait_for_sizes)
        tree, num_nodes = self.drafts.collect(rows.trees, limits)
        if self.grammars.slots:
            slots = [state.slot for state in rows.states]
            tree, num_nodes, mask = self.grammars.constrain(slots, rows.sampling, tree, num_nodes, limits)
        if self._shares_trees or (self._group.size > 1 and rows.has_grammar):
            tree, num_nodes = share_trees(self._group, self.drafts, tree, num_nodes)
        return StepBatch(rows, tree, num_nodes, mask)

    def _have_known_sizes(self, rows: ScheduledBatch, limits: Sequence[DraftLimit]) -> bool:
        """Whether it is known without the drafter how many nodes the trees of decoding rows have."""
        if not self.backend.knows_tree_sizes or self._group.size > 1 or self.grammars.slots:
            return False
        return rows.only_decode and not any(limit.min_score for limit in limits)

    def _finish(self) -> StepResult:
        """End the oldest step on this rank: verify and commit, and prepare the next drafts' input."""
        step = self._started.popleft()
        plan, started, deferred = step.plan, step.started, step.deferred
        if started is None:
            times = StepTimes(step.prepare_seconds, 0.0, 0.0, 0.0)
            return StepResult(plan.step_id, [deferred[slot] for slot in step.slots], times)
        self.backend.wait(started)
        waited = time.perf_counter()
        # A pass that follows another one begins when that one ends. Its time includes what the host did meanwhile.
        times = StepTimes(step.prepare_seconds, waited - max(step.start, self._last_end), 0.0, step.draft_seconds)
        if step.has_ended:
            self._last_end = waited
            states = started.batch.rows.states
            return StepResult(plan.step_id, [_deferred_result(state) for state in states], times)
        outcome = self.backend.finish(started)
        self._last_end = outcome.end
        if step.are_drafts_taken:
            drafts = started.drafts
            assert drafts is not None
            outcome = replace(outcome, replay=lambda: drafts)
        results = self._commit(plan, outcome, step.are_drafts_taken)
        if deferred:
            ready = iter(results)
            results = [deferred.get(slot) or next(ready) for slot in step.slots]
        times = times._replace(verify=time.perf_counter() - waited)
        is_absent, buckets, self.bucket_seconds = self.drafts.max_draft_tokens == 0, self.bucket_seconds, []
        return StepResult(plan.step_id, results, times, *self.drafts.take_report(), is_absent, buckets)

    def _commit(self, plan: StepPlan, outcome: StepOutcome, are_drafts_taken: bool) -> list[RequestResult]:
        """Keep the accepted paths in the host's copy, and what the drafter reads of the step."""
        batch, output, computed = outcome.batch, outcome.output, outcome.computed
        rows, prompts = batch.rows, {}
        # Steps in graphs have no hidden states, and compute no token of a prompt but its last.
        if computed.hidden is not None and any(state.prompt_logprobs for state in rows.states):
            prompts = compute_prompt_logprobs(self.backend.runner.model, batch, computed.hidden)
        starts = [state.num_computed_tokens for state in rows.states]
        results = [self._commit_row(batch, output, row, prompts.get(row)) for row in range(len(rows.states))]
        if self._is_read(plan):
            took_part = [not result.is_deferred for result in results]
            context = draft_context(self._table, plan, outcome, took_part, self._missed, are_drafts_taken)
            self._context, self._missed = context, set()
        elif self.drafts.reads_context:
            for state, first in zip(rows.states, starts, strict=True):
                written = self._table.host_kv_slots[state.slot, first : state.num_computed_tokens]
                self._missed.update(written.tolist())
        return results

    def _commit_row(
        self, batch: StepBatch, output: StepOutput, row: int, prompt_logprobs: list[TokenLogprob] | None
    ) -> RequestResult:
        """Keep a row's accepted path in the host's copy: lengths and tokens."""
        state, num_kept = batch.rows.states[row], output.num_kept(row)
        if state.has_ended:
            return _deferred_result(state)
        if not num_kept:
            state.has_ended = True
            return RequestResult(state.slot, [], 0, None, why_no_token(state, self.grammars, self.model))
        tokens = output.emitted(row)
        forced: Sequence[int] = ()
        if self.grammars.slots:
            self.grammars.accept(state.slot, tokens)
            forced = self.grammars.forced_nodes(state.slot)
        state.num_computed_tokens += batch.rows.num_known[row] + num_kept - 1
        state.has_ended = state.sampling.end_with(tokens, len(state.token_ids) - state.num_prompt_tokens)
        state.token_ids += tokens
        state.sampling.num_output_tokens = len(state.token_ids) - state.num_prompt_tokens
        return RequestResult(
            state.slot,
            tokens,
            batch.num_nodes[row] - 1,
            output.logprobs.get(row),
            None,
            output.accepted_nodes(row),
            prompt_logprobs,
            batch.traced_tree(row) if state.traces_drafts and tokens else None,
            draft_scores=self.drafts.scores[row] if self.drafts.scores else (),
            forced_nodes=forced,
        )


def _needs_result(state: RequestState) -> bool:
    """Whether a request's next step cannot begin before the host has the result of this one."""
    return state.has_ended or state.traces_drafts or state.sampling.needs_walk


def _deferred_result(state: RequestState) -> RequestResult:
    """The result of a request that took no part in a step, or ended before it."""
    return RequestResult(state.slot, [], 0, None, None, is_deferred=True)
