"""The process of one target rank: a `specray` worker and the loop that passes it the router's plans."""

import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.engine.rendezvous import open_store, use_interface
from cluster.liveness.actors import Place, see_own_gpus
from cluster.liveness.watchdog import watch_router
from cluster.process_settings import (
    frozen_garbage_collection,
    lower_priority_from_environment,
    set_log_level_from_environment,
)
from specray.channel import Channel
from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.errors import ConfigError, EngineDeadError
from specray.heartbeat import HeartbeatFile
from specray.worker.remote_drafter.handshake import DraftEndpoint

if TYPE_CHECKING:
    from specray.worker.worker import Worker

DRAFTER_TIMEOUT_S = 60.0  # for the first drafter, which has loaded, to connect


class TargetActor:
    """A Ray actor. Call `start` once, then `loop`, which runs until the rank ends."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        set_log_level_from_environment()
        see_own_gpus()
        self._config = config
        self._rank = rank

    def place(self) -> Place:
        return Place.here()

    def open_store(self) -> str:
        """Open the store for a rendezvous of ranks of several nodes; its init method."""
        self._store, init_method = open_store(Place.here().address)
        return init_method

    def start(
        self,
        init_method: str | None,
        heartbeat_path: str,
        router_heartbeat_path: str,
        endpoint: DraftEndpoint | None,
    ) -> Capacity:
        """Load the model. Returns once all ranks of the group have been started with the same `init_method`.

        Remote drafters connect to `endpoint`; None without remote drafters.
        Beats in `heartbeat_path` from the beginning. Rank 0 watches the router's heartbeat once it has loaded.
        """
        self._endpoint = endpoint
        heartbeat = HeartbeatFile(Path(heartbeat_path))
        heartbeat.keep_beating()
        lower_priority_from_environment()
        with frozen_garbage_collection():
            self._worker = self._load(init_method)
        heartbeat.mark_loaded()
        if self._rank == 0:
            watch_router(HeartbeatFile(Path(router_heartbeat_path)))
        return self._worker.capacity

    def loop(self, address: str, epoch: int) -> None:
        """Run steps until the router or a rank ends. Rank 0 gets its plans from the router's socket at `address`.

        It waits for the engine's drafter first, so that one that does not fit is an error at the engine's start. It
        connects once all ranks have captured their graphs and compiled their kernels.
        """
        from specray.worker.memory import STEPPING, enough_memory
        from specray.worker.rank_worker import RankWorker
        from specray.worker.remote_drafter.source import RemoteDrafts
        from specray.worker.served_loop import ServedLoop
        from specray.worker.warm_up import warm_up

        with enough_memory(self._config, STEPPING, EngineDeadError):
            if self._rank > 0:
                warm_up(self._worker, self._config)
                assert isinstance(self._worker, RankWorker)
                self._worker.run_loop()
                return
            if self._endpoint is not None and self._config.speculative.has_drafter:
                drafts = self._worker.drafts
                assert isinstance(drafts, RemoteDrafts)
                drafts.await_drafter(DRAFTER_TIMEOUT_S)
            warm_up(self._worker, self._config)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(address)
                ServedLoop(self._worker).serve(Channel(connection, epoch))

    def _load(self, init_method: str | None) -> "Worker":
        # The router imports this module and must not load torch.
        import torch

        from specray.worker.loading import choose_device
        from specray.worker.memory import STARTING, await_freed_memory, enough_memory
        from specray.worker.startup import start_worker

        if init_method is not None:
            use_interface(init_method, Place.here().address)
        if (device := choose_device(self._config, self._rank)).type == "cuda":
            await_freed_memory(self._config, partial(torch.cuda.mem_get_info, device))
        with enough_memory(self._config, STARTING, ConfigError):
            return start_worker(
                self._config, self._rank, self._config.tp_size, init_method, progress=True, colocate=self._endpoint
            )
