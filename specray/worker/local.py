"""An executor for one rank in this process, without Ray or sockets."""

from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.errors import ConfigError, EngineDeadError
from specray.grammar import GrammarSpec
from specray.models.target_model import TargetModel
from specray.spec_decode.drafter import Drafter
from specray.step import StepPlan, StepResult
from specray.worker.out_of_memory import STARTING, STEPPING, enough_memory
from specray.worker.startup import start_worker
from specray.worker.step_loop import StepLoop
from specray.worker.warm_up import warm_up


class LocalExecutor:
    """Runs a plan in `collect`, and drafts for the next step there, which begins if its plan is there too."""

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
        self._steps = StepLoop(self.worker)

    def submit(self, plan: StepPlan) -> None:
        self._steps.submit(plan)

    def collect(self) -> StepResult:
        with enough_memory(self._config, STEPPING, EngineDeadError):
            return self._steps.collect()

    def compile_grammar(self, spec: GrammarSpec) -> None:
        """InvalidRequestError if the grammar cannot be compiled. Its requests then start at once."""
        self.worker.grammars.compilation.start(spec).result()

    def close(self) -> None:
        self._steps.close()
