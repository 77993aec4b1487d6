"""The scheduler: which requests run in the next step, and with which KV blocks.

`schedule` makes a StepPlan, `commit` applies its results. Prefill and decode are not distinguished: a request computes
some of its known tokens, and once none is left it verifies a draft tree. `fair_queue` decides who starts next.

A step may be planned before the result of the last one is known. A request then gets blocks for the most tokens that
it can have, and is left out if it may have ended. The worker knows its tokens and needs no more from the plan.

A suspect is a request that an earlier engine computed when it ended. Its first steps run it alone while all others
pause. If this engine ends as well, that request is the cause.
"""

from collections import deque

from specray.config import EngineConfig
from specray.engine.draft_budget import make_budget
from specray.engine.draft_limits import DraftLimits
from specray.engine.executor import Capacity
from specray.engine.fair_queue import FairQueue
from specray.engine.new_request import new_request
from specray.engine.request import Emitted, Planned, Request, Status
from specray.engine.request_slots import RequestSlots
from specray.step import DraftFault, DraftLimit, NewRequest, ScheduledRequest, StepPlan, StepResult

MIXED_STEPS = 16  # that have few prompt tokens after the last one with a decoding request, unless no request is left


class Scheduler:
    """Owns the queue; adds blocks to running requests, and caches those that are full. See also RequestSlots."""

    def __init__(self, config: EngineConfig, capacity: Capacity) -> None:
        self.slots = RequestSlots(config, capacity)
        self.running, self.cache, self.pool = self.slots.running, self.slots.cache, self.slots.pool
        self.states = self.slots.states
        self.block_size = config.page_size
        # Prompt tokens of a step and of one request in it: usually, and few while other requests decode and wait.
        mixed = min(capacity.mixed_prefill_tokens, config.max_prefill_tokens)
        self._prefill_limits = config.max_prefill_tokens, config.chunked_prefill_size
        self._mixed_limits = mixed, min(config.chunked_prefill_size, -(-mixed // 2))
        budget = make_budget(config, config.speculative, capacity)
        self.drafts = DraftLimits(budget, capacity.max_draft_tokens, capacity.context_length)
        self.eos_token_ids = capacity.eos_token_ids
        self.waiting = FairQueue()
        self._num_steps, self._mixed_until = 0, 0
        # The requests of planned steps, each with its number of preemptions at that time.
        self._planned: deque[list[tuple[Request, int]]] = deque()
        self._committing: list[tuple[Request, int]] = []  # those of the step whose result has arrived
        self._suspects: list[Request] = []  # oldest first; only the first one runs

    @property
    def computing(self) -> list[Request]:
        """The requests of the steps that are planned or being committed. Safe to read from another thread."""
        steps = [*self._planned, self._committing]
        return list(dict.fromkeys(request for step in steps for request, _ in step))

    def add(self, request: Request) -> None:
        if request.is_suspect:
            self._suspects.append(request)
        self.waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step: known tokens of running requests, then waiting requests while budget and blocks last.

        Drafts get blocks last, so they never keep a request out of the step. None: there is nothing to do.
        """
        self._committing = []
        self._suspects = [each for each in self._suspects if each.is_suspect and each.status is not Status.FINISHED]
        if self._suspects:
            return self._schedule_alone(self._suspects[0])
        (budget, chunk), num_preemptions = self._limit_prefill(), self.slots.num_preemptions
        work: list[tuple[Request, int, list[int]]] = []  # known tokens to compute, blocks added for them
        for request in list(self.running):
            if request.in_flight and request.most_tokens >= request.max_length:
                continue  # a planned step may end it
            num_tokens = self._num_tokens(request, min(chunk, budget))
            if num_tokens and (blocks := self._keep(request)) is not None:
                work.append((request, num_tokens, blocks))
                budget -= num_tokens if request.num_pending_tokens > 1 else 0
        new_requests: list[NewRequest] = []
        may_start = num_preemptions == self.slots.num_preemptions
        while may_start and self.waiting.num_waiting and self.slots.free and budget > 0:
            request = self.waiting.popleft()
            if not self.slots.admit(request):
                self.waiting.appendleft(request)
                break
            num_tokens = self._num_tokens(request, min(chunk, budget))
            new_requests.append(new_request(request, self.eos_token_ids))
            work.append((request, num_tokens, []))
            budget -= num_tokens
        return self._plan(work, new_requests)

    def _schedule_alone(self, suspect: Request) -> StepPlan | None:
        """Plan a step of one request while all others pause. There is none until no planned step has others."""
        is_ending = bool(suspect.in_flight) and suspect.most_tokens >= suspect.max_length
        if is_ending or any(request is not suspect for step in self._planned for request, _ in step):
            return None
        new_requests, blocks = [], self._keep(suspect) if suspect.status is Status.RUNNING else None
        if suspect.status is Status.WAITING:
            self.waiting.remove(suspect)
            while not (self.slots.free and self.slots.admit(suspect)):
                self._preempt(self.running[-1])
            new_requests, blocks = [new_request(suspect, self.eos_token_ids)], []
        num_tokens = self._num_tokens(suspect, min(self._prefill_limits))
        return self._plan([(suspect, num_tokens, blocks)] if num_tokens and blocks is not None else [], new_requests)

    def _plan(self, work: list[tuple[Request, int, list[int]]], new_requests: list[NewRequest]) -> StepPlan | None:
        limits, runs_drafter = [DraftLimit(0, 0)] * len(work), True
        if self.drafts.max_draft_tokens:
            limits, runs_drafter = self.drafts.of_step([(request, num_tokens) for request, num_tokens, _ in work])
        rows = [self._schedule_request(*item, limit) for item, limit in zip(work, limits, strict=True)]
        freed, self.slots.freed = self.slots.freed, []
        self._num_steps += 1
        if not rows and not freed:
            return None
        self._planned.append([(request, request.num_preemptions) for request, *_ in work])
        return StepPlan(self._num_steps, freed, new_requests, rows, runs_drafter)

    def emitted(self, plan: StepPlan, result: StepResult) -> list[Emitted]:
        """What each request emitted in the oldest planned step.

        Requests that ended after the plan was made, or were preempted and compute these tokens again, are left out.
        """
        emitted, absence = [], _absence(result)
        if self.slots.is_cache_unread and _has_drafts(result):
            self.slots.detach_unread()
        self._committing = self._planned.popleft()
        planned = zip(self._committing, plan.rows, result.rows, strict=True)
        for (request, num_preemptions), row, row_result in planned:
            assert row.slot == row_result.slot, (row, row_result)
            if request.status is Status.RUNNING and request.num_preemptions == num_preemptions:
                emitted.append(Emitted(request, row.num_tokens, row_result, absence))
        return emitted

    def commit(self, emitted: Emitted, num_kept: int) -> None:
        """Append the first `num_kept` of a request's emitted tokens, up to where a stop condition cuts the output."""
        request, result = emitted.request, emitted.result
        planned, start = request.in_flight.pop(0), request.num_computed_tokens
        if result.is_deferred:
            self.states.release(planned.state_copies)
            return  # the same tokens are planned again
        request.num_computed_tokens += emitted.num_tokens
        if result.token_ids:
            num_drafts, budget = result.num_draft_tokens, self.drafts.budget
            if budget.learns and not request.has_grammar:  # which changes the trees
                budget.record_tree(request.acceptance, num_drafts, result.accepted_nodes, result.draft_scores)
            request.count_verify(num_drafts, num_kept - 1, planned.no_drafts or emitted.no_drafts)
            request.num_computed_tokens += num_kept - 1
        request.token_ids += result.token_ids[:num_kept]
        if self.waiting.num_waiting:  # an empty queue charges nobody
            self.waiting.charge(request, len(result.token_ids))
        self._share_full_blocks(request)
        if planned.state_copies:
            self.states.commit(request, planned.state_copies, start)

    def finish(self, request: Request) -> None:
        """Remove a request. Its cached blocks stay cached; its other blocks become free."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self.slots.release(request)
        request.status = Status.FINISHED
        if not self.running and not self.waiting.num_waiting:
            self._mixed_until = 0  # the next prompt delays no other request

    def _limit_prefill(self) -> tuple[int, int]:
        """The limits of this step. Few prompt tokens also follow the end of a request: its client may send the next."""
        if any(request.num_pending_tokens == 1 for request in self.running):
            self._mixed_until = self._num_steps + MIXED_STEPS
        return self._mixed_limits if self._num_steps < self._mixed_until else self._prefill_limits

    def _num_tokens(self, request: Request, limit: int) -> int:
        """Known tokens to compute in this step. Decoding is not charged to the prefill budget."""
        pending = request.num_pending_tokens
        return 1 if pending == 1 else min(pending, limit)

    def _keep(self, request: Request) -> list[int] | None:
        """New blocks for a running request's tokens; None if it was preempted for older ones, or must wait for blocks.

        Requests are preempted only for one whose tokens are known: it may need less than is reserved.
        """
        while request.status is Status.RUNNING:
            if (blocks := self.cache.grow(request.block_ids, request.most_tokens)) is not None:
                return blocks
            if request.in_flight:
                return None
            self._preempt(self.running[-1])
        return None

    def _schedule_request(
        self, request: Request, num_tokens: int, new_block_ids: list[int], limit: DraftLimit
    ) -> ScheduledRequest:
        num_known, num_drafts = request.most_tokens, limit.num_tokens
        if num_drafts:
            new_block_ids = new_block_ids + (self.cache.grow(request.block_ids, num_known + num_drafts) or [])
            num_drafts = min(num_drafts, len(request.block_ids) * self.block_size - num_known)
        no_drafts = "" if num_drafts else "limit"
        if self.drafts.max_draft_tokens and not limit.num_tokens and self.drafts.most(request):
            no_drafts = "budget"
        samples = num_tokens == request.num_pending_tokens
        copies = self.states.reserve(request, num_tokens, num_drafts) if self.states.num_rows else []
        request.in_flight.append(Planned(num_tokens, samples, num_drafts, no_drafts, copies))
        limit = limit._replace(num_tokens=num_drafts)
        return ScheduledRequest(request.slot, num_tokens, limit, new_block_ids, copies)

    def _share_full_blocks(self, request: Request) -> None:
        """Insert blocks into the cache as soon as committed tokens fill them."""
        size, path = self.block_size, request.shared_path
        if not request.shares_prefix:
            return
        while self.cache.enabled and (len(path) + 1) * size <= request.num_computed_tokens:
            start = len(path) * size
            key = tuple(request.token_ids[start : start + size + self.cache.lookahead])
            path.append(self.cache.insert(request.spec.cache_salt, path, key, request.block_ids[len(path)]))

    def _preempt(self, request: Request) -> None:
        """Return a request to the head of the queue."""
        self.slots.preempt(request)
        self.waiting.appendleft(request)


def _absence(result: StepResult) -> str:
    """Why a request of this step has no drafts although it was allowed some, as a field of Undrafted."""
    if DraftFault.LATE in result.draft_faults:
        return "late"
    return "absent" if result.drafter_is_absent or result.draft_faults else "none_found"


def _has_drafts(result: StepResult) -> bool:
    """Whether a drafter drafted for this step."""
    return any(row.num_draft_tokens for row in result.rows) and not result.drafter_is_absent
