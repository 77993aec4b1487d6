"""The speculative step on one rank: collect the trees, run the target over them, keep what it accepts, draft again."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from specray.layers.parallel import RankGroup
from specray.outputs import TokenLogprob
from specray.spec_decode.drafter import DraftSource
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.request_state import RequestState
from specray.spec_decode.request_table import RequestTable
from specray.step import DraftLimit, RequestResult, StepPlan, StepResult, StepTimes
from specray.structured_output.matchers import GrammarTable
from specray.worker.broadcast import DraftSizes, adopt_sizes, broadcast_tree
from specray.worker.draft_context import draft_context
from specray.worker.input_batch import ScheduledBatch, StepBatch
from specray.worker.prompt_logprobs import compute_prompt_logprobs
from specray.worker.step_backend import Pass, StepBackend, StepOutcome, StepWants
from specray.worker.step_output import StepOutput, with_traces

NO_DRAFTS = DraftLimit(0, 0)
NOT_A_NUMBER = "the model's output for this request is NaN or infinite, so no token can be sampled"


class StartedStep(NamedTuple):
    """A step whose pass was started."""

    plan: StepPlan
    started: Pass | None  # None: no row runs
    prepare_seconds: float
    start: float  # time of `time.perf_counter` when the pass was about to start
    draft_seconds: float
    slots: Sequence[int] = ()  # slots of all rows of the plan, on rank 0
    deferred: Mapping[int, RequestResult] = {}  # results of requests that do not run, by slot
    is_early: bool = False  # it began before the step before it was finished
    are_drafts_taken: bool = False  # by the next step, which began early

    @property
    def has_ended(self) -> bool:
        """Whether all its requests ended in the step before, whose result was not there when it began."""
        return self.is_early and self.started is not None and all(s.has_ended for s in self.started.batch.rows.states)


class StepRunner:
    """Starts steps and ends them, in the order in which they began. Every rank has one and gives it equal plans."""

    def __init__(
        self,
        group: RankGroup,
        backend: StepBackend,
        table: RequestTable,
        drafts: DraftSource,
        grammars: GrammarTable,
        shares_trees: bool = False,
    ) -> None:
        """`shares_trees`: the trees of all ranks are rank 0's, because their own ones may not be equal."""
        self._group, self._shares_trees = group, shares_trees
        self._backend = backend
        self._table = table
        self.drafts = drafts
        self._grammars = grammars
        self._nothing = ProposeContext(table, [])
        self._context = self._nothing
        self._missed: set[int] = set()  # KV slots of steps in which the drafter was not called
        self._last_end = 0.0  # of a pass, as far as the host has seen it

    def begin(self, plan: StepPlan) -> StartedStep:
        """Start the step on this rank: collect the drafts and start the forward pass."""
        start = time.perf_counter()
        rows = ScheduledBatch.of(self._table, plan)
        if (states := self._backend.runner.states) is not None:
            states.enter(plan.new_requests)
        if plan.freed_slots:
            self.drafts.release(plan.freed_slots)
        self._context = self._nothing  # the last step's may name slots that were just freed
        if not rows.states:
            prepared = time.perf_counter()
            return StartedStep(plan, None, prepared - start, prepared, 0.0)
        has_grammar = any(state.sampling.options.grammar is not None for state in rows.states)
        batch = self._collect(plan, rows, has_grammar)
        draft_seconds = self.drafts.seconds
        prepared = time.perf_counter()
        wants = StepWants(
            self.drafts.aux_hidden_state_layers if plan.runs_drafter and self.drafts.reads_context else (),
            has_grammar,
            _draft_limits(plan),
        )
        return StartedStep(plan, self._backend.begin(batch, wants), prepared - start, prepared, draft_seconds)

    def may_be_followed(self, step: StartedStep) -> bool:
        """Whether another step may begin early after this one. Ranks agree on this."""
        return step.started is not None and self._backend.can_begin_after(step.started)

    def can_begin_after(self, before: StartedStep, plan: StepPlan) -> bool:
        """Whether a step may begin while the one before is not finished.

        Then both decode the same requests, and the second pass takes the tokens from the first one. It has no drafts,
        or those that the device made after the first one.
        """
        if plan.new_requests or plan.freed_slots:
            return False
        if any(row.state_copies for row in plan.rows):  # the host says how far behind its first token each one is
            return False
        if before.started is None or not before.started.batch.rows.are_all_sampling:
            return False
        states = before.started.batch.rows.states
        if [row.slot for row in plan.rows] != [state.slot for state in states] or any(map(needs_result, states)):
            return False
        cuts = any(row.draft_limit.min_score for row in plan.rows)  # the host cuts trees by scores
        has_drafts = before.started.drafts is not None and not cuts
        return (has_drafts or self._drafts_nothing(before.plan, plan)) and self.may_be_followed(before)

    def begin_after(self, last: StartedStep, plan: StepPlan) -> tuple[StartedStep, StartedStep]:
        """Start a step over the tokens that the pass before it chooses: (the last step now, this step).

        See `can_begin_after`.
        """
        start = time.perf_counter()
        before, drafted = last.started, None
        assert before is not None
        for row in plan.rows:
            self._table.extend(row.slot, [], row.new_block_ids)
        if before.drafts is not None:
            slots, limits = before.batch.rows.slots, [row.draft_limit for row in plan.rows]
            drafted = self.drafts.take_next(before.drafts, slots, self._table.last_tokens(slots), limits)
            last = last._replace(are_drafts_taken=True)
        started = self._backend.begin_after(before, drafted, _draft_limits(plan))
        return last, StartedStep(plan, started, 0.0, start, 0.0, is_early=True)

    def finish(self, step: StartedStep) -> StepResult:
        """The rest of the step on this rank: verify and commit, and prepare the next drafts' input."""
        plan, started, deferred = step.plan, step.started, step.deferred
        if started is None:
            times = StepTimes(step.prepare_seconds, 0.0, 0.0, 0.0)
            return StepResult(plan.step_id, [deferred[slot] for slot in step.slots], times)
        self._backend.wait(started)
        waited = time.perf_counter()
        # A pass that follows another one begins when that one ends. Its time includes what the host did meanwhile.
        times = StepTimes(step.prepare_seconds, waited - max(step.start, self._last_end), 0.0, step.draft_seconds)
        if step.has_ended:
            self._last_end = waited
            states = started.batch.rows.states
            return StepResult(plan.step_id, [deferred_result(state) for state in states], times)
        outcome = self._backend.finish(started)
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
        uses, faults = self.drafts.take_uses(), self.drafts.take_faults()
        is_absent = self.drafts.max_draft_tokens == 0
        return StepResult(plan.step_id, results, times, faults, uses, self.drafts.take_is_new(), is_absent)

    def propose(self) -> None:
        """Draft for the next step; called after `finish`."""
        context, self._context = self._context, self._nothing
        self.drafts.submit(context)

    def _drafts_nothing(self, *plans: StepPlan) -> bool:
        """Whether these steps neither verify drafts nor make any."""
        return not self.drafts.reads_context or not any(
            plan.runs_drafter or any(row.draft_limit.num_tokens for row in plan.rows) for plan in plans
        )

    def _collect(self, plan: StepPlan, rows: ScheduledBatch, has_grammar: bool) -> StepBatch:
        """The draft trees of the rows that sample, and what grammars, which rank 0 alone has, allow at their nodes."""
        sampling, mask = set(rows.sampling), None
        limits = [row.draft_limit if place in sampling else NO_DRAFTS for place, row in enumerate(plan.rows)]
        if self._have_known_sizes(rows, limits):
            unsized = self.drafts.take_unsized(rows.slots, rows.roots, limits)
            if unsized is not None:
                return StepBatch(rows, unsized.tree, unsized.most_nodes, None, unsized.wait_for_sizes)
        tree, num_nodes = self.drafts.collect(rows.trees, limits)
        if self._grammars.slots:
            slots = [state.slot for state in rows.states]
            tree, num_nodes, mask = self._grammars.constrain(slots, rows.sampling, tree, num_nodes, limits)
        if self._shares_trees or (has_grammar and self._group.size > 1):
            tree, num_nodes, sizes = broadcast_tree(self._group, tree, num_nodes, DraftSizes.of(self.drafts))
            adopt_sizes(self.drafts, sizes)
        return StepBatch(rows, tree, num_nodes, mask)

    def _have_known_sizes(self, rows: ScheduledBatch, limits: Sequence[DraftLimit]) -> bool:
        """Whether it is known without the drafter how many nodes the trees of decoding rows have."""
        if not self._backend.knows_tree_sizes or self._group.size > 1 or self._grammars.slots:
            return False
        are_decoding = rows.are_all_sampling and max(rows.num_known) == 1
        return are_decoding and not any(limit.min_score for limit in limits)

    def _commit(self, plan: StepPlan, outcome: StepOutcome, are_drafts_taken: bool) -> list[RequestResult]:
        """Keep the accepted paths in the host's copy, and what the drafter reads of the step."""
        batch, output, computed = outcome.batch, outcome.output, outcome.computed
        rows, prompts = batch.rows, {}
        # Steps in graphs have no hidden states, and compute no token of a prompt but its last.
        if computed.hidden is not None and any(state.prompt_logprobs for state in rows.states):
            prompts = compute_prompt_logprobs(self._backend.runner.model, batch, computed.hidden)
        starts = [state.num_computed_tokens for state in rows.states]
        results = [self._commit_row(batch, output, row, prompts.get(row)) for row in range(len(rows.states))]
        for row, scores in enumerate(self.drafts.scores):
            if not results[row].is_deferred:
                results[row] = results[row]._replace(draft_scores=scores)
        if any(state.traces_drafts for state in rows.states):
            results = with_traces(results, batch, output)
        if plan.runs_drafter and self.drafts.reads_context:
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
            return deferred_result(state)
        if not num_kept:
            state.has_ended = True
            return RequestResult(state.slot, [], 0, None, self._grammars.error(state.slot) or NOT_A_NUMBER)
        tokens = output.emitted(row)
        forced: Sequence[int] = ()
        if self._grammars.slots:
            self._grammars.accept(state.slot, tokens)
            forced = self._grammars.forced_nodes(state.slot)
        state.num_computed_tokens += batch.rows.num_known[row] + num_kept - 1
        state.has_ended = state.sampling.end_with(tokens, len(state.token_ids) - state.num_prompt_tokens)
        state.token_ids += tokens
        state.sampling.num_output_tokens = len(state.token_ids) - state.num_prompt_tokens
        num_drafts, nodes, logprobs = batch.num_nodes[row] - 1, output.accepted_nodes(row), output.logprobs.get(row)
        return RequestResult(
            state.slot, tokens, num_drafts, logprobs, None, nodes, prompt_logprobs, forced_nodes=forced
        )


def _draft_limits(plan: StepPlan) -> list[DraftLimit]:
    """See StepWants."""
    limits = [row.draft_limit for row in plan.rows]
    return limits if plan.runs_drafter and all(limit.allows_drafts for limit in limits) else []


def needs_result(state: RequestState) -> bool:
    """Whether a request's next step cannot begin before the host has the result of this one."""
    return state.has_ended or state.traces_drafts or state.sampling.needs_walk


def deferred_result(state: RequestState) -> RequestResult:
    """The result of a request that took no part in a step, or ended before it."""
    return RequestResult(state.slot, [], 0, None, None, is_deferred=True)
