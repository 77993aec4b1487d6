"""Step costs on disk, so that a restarted server does not measure them again."""

import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from specray.caches import cache_root
from specray.config import EngineConfig
from specray.engine.draft_budget.costs import StepCosts
from specray.engine.executor import Capacity

logger = logging.getLogger(__name__)

VERSION = 4  # of what the files hold


class CostStore:
    """One file for each kind of machine, model and configuration.

    The log names a file that cannot be read, and once that it cannot be written; the engine works without.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_failed = False
        self._writing: threading.Thread | None = None  # the last write, which may still go on

    @classmethod
    def of(cls, config: EngineConfig, capacity: Capacity) -> "CostStore":
        described = (VERSION, capacity.hardware, capacity.dtype, config.model_dump_json())
        name = hashlib.sha256(repr(described).encode()).hexdigest()[:24]
        return cls(cache_root() / "step-costs" / f"{name}.json")

    def load(self) -> StepCosts:
        """The stored costs, or none."""
        try:
            return StepCosts.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return StepCosts()
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logger.warning(
                "the costs of steps are measured again, because %s cannot be read: %s: %s",
                self.path,
                type(error).__name__,
                error,
            )
            return StepCosts()

    def save(self, costs: StepCosts) -> None:
        """Write the costs in another thread. Does nothing while the write before goes on: they are saved again."""
        if self._writing is not None and self._writing.is_alive():
            return
        self._writing = threading.Thread(target=self._write, args=(costs.to_json(),), daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until the costs that were saved last are on disk."""
        if self._writing is not None:
            self._writing.join()

    def _write(self, costs: dict[str, Any]) -> None:
        partial = self.path.with_suffix(f".{os.getpid()}.partial")  # engines of one configuration share the file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(costs), encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("the costs of steps are not kept for the next start: %s", error)
            self._has_failed = True
