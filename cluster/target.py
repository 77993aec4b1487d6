"""The process of one target rank: a `specray` worker, and the never-ending loop that feeds it.

Not here: what a step does (`specray.worker`), and who started this process (`executor`).
"""

import os
import socket
from pathlib import Path

from cluster.processes import Pulse
from specray.channel import Channel, ChannelClosedError
from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.step import pack, unpack_plan


class TargetActor:
    """A Ray actor. `start` once, then `loop`: its end is the end of the rank."""

    def __init__(
        self, config: EngineConfig, rank: int, init_method: str | None, doorbell: tuple[str, int] | None, pulse: str
    ) -> None:
        self._config = config
        self._rank = rank
        self._init_method = init_method
        self._pulse = pulse  # path of the file that shows whether this process runs
        self._doorbell = doorbell  # where drafters in processes of their own knock; None: it drafts itself

    def start(self) -> Capacity:
        """Load the model. Every rank of a group has to be started for any to return."""
        # Here, not above: the router imports this module, and torch must stay out of its process.
        from specray.worker.colocated import Doorbell
        from specray.worker.worker import Worker

        Pulse(Path(self._pulse)).keep_beating()
        doorbell = None if self._doorbell is None else Doorbell(*self._doorbell)
        self._worker = Worker(
            self._config, self._rank, self._config.tp_size, self._init_method, progress=True, colocate=doorbell
        )
        return self._worker.capacity

    def pid(self) -> int:
        return os.getpid()

    def loop(self, address: str, epoch: int) -> None:
        """Rank 0 takes plans from the router's socket at `address`, the others from rank 0, until either is gone."""
        if self._rank > 0:
            self._worker.follow()
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(address)
            self._serve(Channel(connection, epoch))

    def _serve(self, channel: Channel) -> None:
        while True:
            try:
                plan = unpack_plan(channel.recv())
                result = self._worker.execute(plan)
                channel.send(pack(result))
            except ChannelClosedError:
                return
            self._worker.propose()
