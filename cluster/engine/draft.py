"""The process of a colocated drafter. `specray.worker.remote_drafter` has its protocol with the target rank."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.process_settings import (
    frozen_garbage_collection,
    lower_priority_from_environment,
    set_log_level_from_environment,
)
from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.heartbeat import HeartbeatFile
from specray.worker.remote_drafter.handshake import DrafterHandshake

if TYPE_CHECKING:
    from specray.spec_decode.drafter import TargetView


class DraftActor:
    """A Ray actor. Call `start` once, then `loop`, which runs until the drafter ends."""

    def __init__(self, config: EngineConfig, heartbeat_path: str) -> None:
        """Start beating in `heartbeat_path` and loading what the drafter needs of the target."""
        set_log_level_from_environment()
        self._heartbeat = HeartbeatFile(Path(heartbeat_path))
        self._heartbeat.keep_beating()
        self._config = config
        # This takes seconds. An engine's first drafter loads while the target does. `start` raises its errors.
        self._target = ThreadPoolExecutor(1).submit(_load_target_view, config)

    def start(self, num_slots: int) -> DrafterHandshake:
        """Load the drafter, for a target with `num_slots` KV slots."""
        lower_priority_from_environment()
        target = self._target.result()
        from specray.ops.device_ops import ops_on
        from specray.worker.memory import enough_memory
        from specray.worker.remote_drafter.server import make_draft_server

        if self._config.num_threads is not None:
            ops_on(target.device).use_threads(self._config.num_threads)
        with frozen_garbage_collection(), enough_memory(self._config, "loading the drafter", ConfigError):
            self._server = make_draft_server(self._config, target, num_slots)
        return self._server.handshake

    def loop(self, address: str, epoch: int) -> None:
        """Draft for the target that listens at the unix socket `address`, until either process ends.

        EngineDeadError if the target refuses this drafter.
        """
        self._server.serve(address, epoch, on_accept=self._heartbeat.mark_loaded)


def _load_target_view(config: EngineConfig) -> "TargetView":
    with frozen_garbage_collection():
        # The router imports this module and must not load torch.
        from specray.worker.remote_drafter.server import remote_target_view

        return remote_target_view(config)
