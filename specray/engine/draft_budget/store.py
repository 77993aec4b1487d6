"""Step costs on disk, so that a restarted server does not measure them again."""

import hashlib
import json
import logging
import os
from pathlib import Path

from specray.caches import cache_root
from specray.config import EngineConfig
from specray.engine.draft_budget.costs import StepCosts
from specray.engine.executor import Capacity

logger = logging.getLogger(__name__)

VERSION = 4  # of what the files hold


class CostStore:
    """One file for each kind of machine, model and configuration. Files that cannot be read or written are ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_failed = False

    @classmethod
    def of(cls, config: EngineConfig, capacity: Capacity) -> "CostStore":
        described = (VERSION, capacity.hardware, capacity.dtype, config.model_dump_json())
        name = hashlib.sha256(repr(described).encode()).hexdigest()[:24]
        return cls(cache_root() / "step-costs" / f"{name}.json")

    def load(self) -> StepCosts:
        """The stored costs, or none."""
        try:
            return StepCosts.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return StepCosts()

    def save(self, costs: StepCosts) -> None:
        partial = self.path.with_suffix(f".{os.getpid()}.partial")  # engines of one configuration share the file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(costs.to_json()), encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("the costs of steps are not kept for the next start: %s", error)
            self._has_failed = True
