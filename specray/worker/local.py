"""An executor for one rank in this process, without Ray or sockets."""

from collections import deque

from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.errors import ConfigError, EngineDeadError
from specray.grammar import GrammarSpec
from specray.models.target_model import TargetModel
from specray.spec_decode.drafter import Drafter
from specray.step import StepPlan, StepResult
from specray.worker.memory import STARTING, STEPPING, enough_memory, raise_if_out_of_memory
from specray.worker.startup import start_worker
from specray.worker.warm_up import warm_up


class LocalExecutor:
    """Runs a plan in `collect`, and drafts for the next step there.

    If that step's plan is there too, its forward pass is started, so it runs while the caller handles this result. If
    the worker can, it is started before this step is finished, so that one pass follows the other at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        drafter: Drafter | None = None,
        model: TargetModel | None = None,
    ) -> None:
        if config.tp_size != 1:
            raise ConfigError(
                f"tp_size={config.tp_size} needs a process per rank, which an in-process engine does not start; "
                "set tp_size=1 or serve it with `serve run`"
            )
        self._config = config
        with enough_memory(config, STARTING, ConfigError):
            self.worker = start_worker(config, progress=progress, drafter=drafter, model=model)
            warm_up(self.worker, config)
        overlaps = self.worker.starts_passes and not config.disable_overlap_schedule
        self.capacity: Capacity = self.worker.capacity._replace(max_plans=2 if overlaps else 1)
        self._plans: deque[StepPlan] = deque()
        self._failure: Exception | None = None  # of a step; it is raised when those before it were collected

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        try:
            self._begin()
            if self._failure is not None and not self.worker.num_started:
                raise self._failure
            result = self.worker.finish()
            self.worker.propose()
            self._begin()
        except (MemoryError, RuntimeError) as failure:
            raise_if_out_of_memory(failure, self._config, STEPPING, EngineDeadError)
            raise
        return result

    def _begin(self) -> None:
        """Start the steps that can be started. One that fails ends itself, not those before."""
        try:
            while self._plans and self._failure is None and self.worker.can_begin(self._plans[0]):
                self.worker.begin(self._plans.popleft())
        except Exception as failure:
            self._failure = failure

    def compile_grammar(self, spec: GrammarSpec) -> None:
        """InvalidRequestError if the grammar cannot be compiled. Its requests then start at once."""
        self.worker.grammars.compilation.start(spec).result()

    def close(self) -> None:
        self.worker.close()
