"""One rank of the target: the order of its steps, equal on all ranks.

`execute` is a whole step, `begin` and `finish` are its halves, which `StepRunner` has. A step may begin early, before
the one before is finished: its forward pass takes the tokens, and the trees that a graph drafted, from the device. All
ranks run the same code on rank 0's plan and outcome of verification, and on its trees where theirs may not be equal, so
ranks cannot diverge.
"""

from collections import deque

import torch

from specray.engine.executor import Capacity
from specray.layers.parallel import RankGroup
from specray.models.target_model import TargetModel
from specray.spec_decode.drafter import DraftSource
from specray.spec_decode.request_table import RequestTable
from specray.step import BucketSeconds, RequestResult, StepPlan, StepResult
from specray.step_wire import pack, unpack_plan
from specray.structured_output.matchers import GrammarTable
from specray.worker.broadcast import DraftSizes, adopt_sizes, broadcast_sizes
from specray.worker.step_backend import StepBackend
from specray.worker.step_runner import StartedStep, StepRunner, deferred_result

# Commands to ranks above 0. The first two come before a plan. They finish a step without a command if none can begin
# early after it, and when one has begun early after it.
_BEGIN, _BEGIN_EARLY, _FINISH = b"\0", b"\1", b"\2"


class Worker:
    """One rank, as `startup` makes it. Rank 0 is driven by `execute` and `propose`, the others by `run_loop`."""

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
        self.grammars = grammars
        self.capacity = capacity
        self._group, self._shares_trees = group, shares_trees
        self.backend = backend
        self._table = table
        self._steps = StepRunner(group, backend, table, drafts, grammars, shares_trees)
        self.bucket_seconds: list[BucketSeconds] = []  # to be reported with the next result
        self._inference = torch.inference_mode()  # kept, because making one takes longer than entering it
        self._started: deque[StartedStep] = deque()  # and not finished

    @property
    def drafts(self) -> DraftSource:
        return self._steps.drafts

    @drafts.setter
    def drafts(self, drafts: DraftSource) -> None:
        self._steps.drafts = drafts

    @property
    def model(self) -> TargetModel:
        return self.backend.runner.model

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which gets the plans."""
        return self._group.leads

    def prepare(self) -> None:
        """Capture CUDA graphs for the trees of the drafter; all ranks call it together."""
        if self._shares_trees:
            adopt_sizes(self.drafts, broadcast_sizes(self._group, DraftSizes.of(self.drafts)))
        self.backend.prepare()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: target forward over known tokens and draft trees, verify, keep the accepted path."""
        self.begin(plan)
        return self.finish()

    def begin(self, plan: StepPlan) -> None:
        """Start a step. Its forward pass may still run when this returns.

        Nothing but `finish` may be called then, or `begin` if `can_begin`.
        """
        with self._inference:
            self._started.append(self._begin_early(plan) if self._started else self._lead(plan))

    def can_begin(self, plan: StepPlan) -> bool:
        """Whether `begin` may start this step now, though another one may not be finished."""
        if not self._started:
            return True
        return len(self._started) == 1 and self._steps.can_begin_after(self._started[0], plan)

    @property
    def num_started(self) -> int:
        """Steps that were started and not finished."""
        return len(self._started)

    def has_result(self) -> bool:
        """Whether `finish` would return at once."""
        started = self._started[0].started
        return started is None or self.backend.has_ended(started)

    def finish(self) -> StepResult:
        """The result of the oldest step that was started."""
        with self._inference:
            step = self._started.popleft()
            if self._group.size > 1 and not self._started and self._steps.may_be_followed(step):
                self._group.broadcast_bytes(_FINISH)
            result, buckets, self.bucket_seconds = self._steps.finish(step), self.bucket_seconds, []
            return result._replace(bucket_seconds=buckets) if buckets else result

    def propose(self) -> None:
        """Draft for the next step; called after `finish`."""
        self._steps.propose()

    @torch.inference_mode()
    def run_loop(self) -> None:
        """Run the plans of rank 0 until the group breaks; for ranks above 0."""
        while True:
            data = self._group.broadcast_bytes(None)
            command = data[:1]
            if command != _FINISH:
                plan = unpack_plan(data[1:])
                self._started.append(self._begin_early(plan) if command == _BEGIN_EARLY else self._steps.begin(plan))
            if command != _BEGIN:
                self._end_oldest()
            if self._started and not self._steps.may_be_followed(self._started[-1]):
                self._end_oldest()

    def close(self) -> None:
        self._group.close()

    def _end_oldest(self) -> None:
        """On ranks above 0, what rank 0 does when it calls `finish` and `propose`."""
        self._steps.finish(self._started.popleft())
        self.propose()

    def _begin_early(self, plan: StepPlan) -> StartedStep:
        """Start a step after one that is not finished. On rank 0, the other ranks are told to."""
        if self._group.leads and self._group.size > 1:
            self._group.broadcast_bytes(_BEGIN_EARLY + pack(plan))
        self._started[-1], step = self._steps.begin_after(self._started[-1], plan)
        return step

    def _lead(self, plan: StepPlan) -> StartedStep:
        """Start the step on all ranks, without the requests that cannot run."""
        ready, deferred = self._without_deferred(plan)
        if self._group.size > 1:
            self._group.broadcast_bytes(_BEGIN + pack(ready))
        return self._steps.begin(ready)._replace(slots=[row.slot for row in plan.rows], deferred=deferred)

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
            deferred |= {slot: deferred_result(self._table.states[slot]) for slot in ended}
            plan = plan._replace(rows=[row for row in plan.rows if row.slot not in deferred])
        return plan, deferred
