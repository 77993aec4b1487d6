"""The process of one target rank: a `specray` worker, and the never-ending loop that feeds it.

Not here: what a step does (`specray.worker`), and who started this process (`executor`).
"""

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.engine.garbage import all_that_stays
from cluster.engine.rendezvous import open_store, use_interface
from cluster.liveness.actors import Place
from cluster.liveness.heartbeat import Heartbeat
from cluster.liveness.watchdog import watch_router
from cluster.log_level import set_log_level_from_environment
from specray.channel import Channel, ChannelClosedError
from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.errors import ConfigError, EngineDeadError
from specray.step import pack, unpack_plan
from specray.worker.remote_drafter.handshake import DraftEndpoint

if TYPE_CHECKING:
    from specray.worker.worker import Worker


class TargetActor:
    """A Ray actor. `start` once, then `loop`: its end is the end of the rank."""

    def __init__(self, config: EngineConfig, rank: int, endpoint: DraftEndpoint | None) -> None:
        set_log_level_from_environment()
        self._config = config
        self._rank = rank
        self._endpoint = endpoint  # where drafters in processes of their own knock; None: it drafts itself

    def place(self) -> Place:
        return Place.here()

    def open_store(self) -> str:
        """Have ranks of several nodes meet in this process; torch.distributed's address of the place."""
        self._store, meeting = open_store(Place.here().address)
        return meeting

    def start(self, meeting: str | None, heartbeat: str, router: str) -> Capacity:
        """Load the model. The file `heartbeat` is written from the start; rank 0 then watches the file `router`.

        Every rank of a group has to be started, with the same address to meet at, for any to return.
        """
        own = Heartbeat(Path(heartbeat))
        own.keep_beating()
        with all_that_stays():
            self._worker = self._load(meeting)
        own.begin_work()
        if self._rank == 0:
            watch_router(Heartbeat(Path(router)))
        return self._worker.capacity

    def loop(self, address: str, epoch: int) -> None:
        """Rank 0 takes plans from the router's socket at `address`, the others from rank 0, until either is gone."""
        from specray.worker.memory import STEPPING, enough_memory

        with enough_memory(self._config, STEPPING, EngineDeadError):
            if self._rank > 0:
                self._worker.follow()
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(address)
                self._serve(Channel(connection, epoch))

    def _load(self, meeting: str | None) -> "Worker":
        # Here, not above: the router imports this module, and torch must stay out of its process.
        from specray.worker.memory import STARTING, enough_memory
        from specray.worker.worker import Worker

        if meeting is not None:
            use_interface(meeting, Place.here().address)
        with enough_memory(self._config, STARTING, ConfigError):
            return Worker(
                self._config, self._rank, self._config.tp_size, meeting, progress=True, colocate=self._endpoint
            )

    def _serve(self, channel: Channel) -> None:
        while True:
            try:
                plan = unpack_plan(channel.recv())
                result = self._worker.execute(plan)
                channel.send(pack(result))
            except ChannelClosedError:
                return
            self._worker.propose()
