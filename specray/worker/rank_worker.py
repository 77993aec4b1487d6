"""One of several ranks. Rank 0 gets the plans and passes them on; all ranks run the same steps.

They have rank 0's plans and outcomes of verification, and its trees where theirs may not be equal, so they cannot
diverge.
"""

import torch

from specray.step import StepPlan, StepResult
from specray.step_wire import pack, unpack_plan
from specray.worker.broadcast import share_sizes
from specray.worker.worker import StartedStep, Worker

# Commands to ranks above 0. The first two come before a plan. They finish a step without a command if none can begin
# early after it, and when one has begun early after it.
_BEGIN, _BEGIN_EARLY, _FINISH = b"\0", b"\1", b"\2"


class RankWorker(Worker):
    """Rank 0 is driven as the only rank is, the others by `run_loop`."""

    def prepare(self) -> None:
        if self._shares_trees:
            share_sizes(self._group, self.drafts)
        super().prepare()

    def finish(self) -> StepResult:
        if len(self._started) == 1 and self._may_be_followed(self._started[0]):
            self._group.broadcast_bytes(_FINISH)
        return super().finish()

    @torch.inference_mode()
    def run_loop(self) -> None:
        """Run the plans of rank 0 until the group breaks; for ranks above 0."""
        while True:
            data = self._group.broadcast_bytes(None)
            command = data[:1]
            if command == _BEGIN:
                self._begin(unpack_plan(data[1:]))
            elif command == _BEGIN_EARLY:
                self._begin_early(unpack_plan(data[1:]))
            if command != _BEGIN or not self._may_be_followed(self._started[-1]):
                self._finish()
                self.propose()

    def _begin(self, plan: StepPlan) -> None:
        self._tell(_BEGIN, plan)
        super()._begin(plan)

    def _begin_early(self, plan: StepPlan) -> None:
        self._tell(_BEGIN_EARLY, plan)
        super()._begin_early(plan)

    def _tell(self, command: bytes, plan: StepPlan) -> None:
        """On rank 0, give a plan to the other ranks."""
        if self._group.leads:
            self._group.broadcast_bytes(command + pack(plan))

    def _may_be_followed(self, step: StartedStep) -> bool:
        """Whether another step may begin early after this one. Ranks agree on this."""
        return step.started is not None and self.backend.can_begin_after(step.started)
