"""The process of a colocated drafter. `specray.worker.remote_drafter` has its protocol with the target rank."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.engine.rendezvous import open_store, use_interface
from cluster.liveness.actors import Place, see_own_gpus
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
    """A Ray actor, one of those that draft together. Call `start` once, then `loop`, which runs until it ends."""

    def __init__(self, config: EngineConfig, heartbeat_path: str, rank: int = 0) -> None:
        """Start loading what the drafter needs of the target, and writing heartbeats to the router's `heartbeat_path`.

        Rank 0 runs on the router's node. Other ranks may run on nodes without this file, and write none there.
        """
        set_log_level_from_environment()
        see_own_gpus()
        self._heartbeat = None
        if rank == 0 or Path(heartbeat_path).exists():
            self._heartbeat = HeartbeatFile(Path(heartbeat_path))
            self._heartbeat.keep_beating()
        self._config, self._rank = config, rank
        # This takes seconds. An engine's first drafter loads while the target does. `start` raises its errors.
        self._target = ThreadPoolExecutor(1).submit(_load_target_view, config)

    def open_store(self) -> str:
        """Open the store for a rendezvous of actors of several nodes; its init method."""
        self._store, init_method = open_store(Place.here().address)
        return init_method

    def start(self, num_slots: int, init_method: str | None = None, size: int = 1) -> DrafterHandshake:
        """Load the drafter, for a target with `num_slots` KV slots.

        Returns once all `size` actors that draft together have been started with the same `init_method`.
        """
        lower_priority_from_environment()
        target = self._target.result()
        from specray.layers.parallel import RankGroup
        from specray.ops.device_ops import ops_on
        from specray.worker.memory import enough_memory
        from specray.worker.remote_drafter.server import make_draft_server

        if self._config.num_threads is not None:
            ops_on(target.device).use_threads(self._config.num_threads)
        if init_method is not None:
            use_interface(init_method, Place.here().address)
        group = RankGroup(self._rank, size, init_method, target.device, self._config.deterministic)
        with frozen_garbage_collection(), enough_memory(self._config, "loading the drafter", ConfigError):
            self._server = make_draft_server(self._config, replace(target, group=group), num_slots)
        return self._server.handshake

    def loop(self, address: str, epoch: int) -> None:
        """Draft for the target that listens at the unix socket `address`, until either process ends.

        Rank 0 connects, the others follow it. EngineDeadError if the target refuses this drafter.
        """
        if self._rank > 0:
            self._server.follow()
            return
        assert self._heartbeat is not None
        self._server.serve(address, epoch, on_accept=self._heartbeat.mark_loaded)


def _load_target_view(config: EngineConfig) -> "TargetView":
    with frozen_garbage_collection():
        # The router imports this module and must not load torch.
        from specray.worker.remote_drafter.server import remote_target_view

        return remote_target_view(config)
