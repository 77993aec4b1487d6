"""Step costs on disk, so that a restarted server does not measure them again."""

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path

from specray.caches import cache_root
from specray.config import EngineConfig
from specray.engine.draft_budget.costs import StepCosts
from specray.engine.executor import Capacity

VERSION = 2  # in the first one, times of different shapes had drifted apart


class CostStore:
    """One file for each machine, model and configuration. Files that cannot be read or written are ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, config: EngineConfig, capacity: Capacity) -> "CostStore":
        num_cores = len(os.sched_getaffinity(0))
        described = (VERSION, platform.node(), platform.machine(), num_cores, capacity.dtype, config.model_dump_json())
        name = hashlib.sha256(repr(described).encode()).hexdigest()[:24]
        return cls(cache_root() / "step-costs" / f"{name}.json")

    def load(self) -> StepCosts:
        """The stored costs, or none."""
        try:
            return StepCosts.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return StepCosts()

    def save(self, costs: StepCosts) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(f".{os.getpid()}.partial")  # engines of one configuration share the file
            partial.write_text(json.dumps(costs.to_json()), encoding="utf-8")
            partial.replace(self.path)
