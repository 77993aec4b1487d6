"""An executor that starts its rank in this process, without Ray or sockets."""

from typing import NoReturn

from specray.config import EngineConfig
from specray.errors import ConfigError, EngineDeadError
from specray.grammar import GrammarSpec
from specray.models.target_model import TargetModel
from specray.spec_decode.drafter import Drafter
from specray.worker.memory import STARTING, STEPPING, enough_memory
from specray.worker.startup import start_worker
from specray.worker.step_loop import StepLoop
from specray.worker.warm_up import warm_up


class LocalExecutor(StepLoop):
    """Starts the rank."""

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
            worker = start_worker(config, progress=progress, drafter=drafter, model=model)
            warm_up(worker, config)
        overlaps = worker.backend.starts_passes and not config.disable_overlap_schedule
        worker.capacity = worker.capacity._replace(max_plans=2 if overlaps else 1)
        super().__init__(worker)

    def compile_grammar(self, spec: GrammarSpec) -> None:
        """InvalidRequestError if the grammar cannot be compiled. Its requests then start at once."""
        self.worker.grammars.compilation.start(spec).result()

    def _fail(self, failure: Exception) -> NoReturn:
        with enough_memory(self._config, STEPPING, EngineDeadError):
            raise failure
