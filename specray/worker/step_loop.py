"""The order in which rank 0 runs steps. `served_loop` takes them from a router at the other end of a channel."""

from collections import deque
from typing import NoReturn

from specray.engine.executor import Capacity
from specray.step import StepPlan, StepResult
from specray.worker.worker import Worker


class StepLoop:
    """An Executor over the worker in this process: a step begins as soon as its plan is there and the worker can."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._plans: deque[StepPlan] = deque()
        self._failure: Exception | None = None  # of a step; it is raised when those before it were collected

    @property
    def capacity(self) -> Capacity:
        return self.worker.capacity

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        try:
            result = self._finish()
            self._go_on()
        except Exception as failure:
            self._fail(failure)
        return result

    def close(self) -> None:
        self.worker.close()

    def _fail(self, failure: Exception) -> NoReturn:
        """Raise the failure of a step."""
        raise failure

    def _finish(self) -> StepResult:
        """The result of the oldest step."""
        self._begin()
        if self._failure is not None and not self.worker.num_started:
            raise self._failure
        return self.worker.finish()

    def _go_on(self) -> None:
        """After a step: draft for the next one, and begin it if its plan is there."""
        self.worker.propose()
        self._begin()

    def _begin(self) -> None:
        """Start the steps that can be started. One that fails ends itself, not those before."""
        try:
            while self._plans and self._failure is None and self.worker.can_begin(self._plans[0]):
                self.worker.begin(self._plans.popleft())
        except Exception as failure:
            self._failure = failure
