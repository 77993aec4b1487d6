"""The engine's door to ranks that are Ray actors: Ray starts and watches them, a socket carries the steps.

Not here: where they run (`placement`), what they run (`target`), what a step is (`specray.step`).
"""

import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from cluster.channel import Channel, ChannelClosedError
from cluster.config import AppConfig
from cluster.placement import Placement, rank_resources, uses_gpus
from cluster.target import TargetActor
from specray.engine.executor import Capacity
from specray.errors import ConfigError, EngineDeadError
from specray.step import StepPlan, StepResult, pack, unpack_result

POLL_S = 0.2  # how soon a dead rank is noticed while another one is waited for
LAST_WORDS_S = 2.0  # how long a closed socket's rank is given to say why

logger = logging.getLogger("ray.serve")


class RayExecutor:
    """Starts one actor per rank and runs plans on rank 0; an `Executor` of the engine."""

    def __init__(self, config: AppConfig) -> None:
        with_gpus = uses_gpus(config)
        self._placement = Placement(config, with_gpus)
        self._folder = tempfile.TemporaryDirectory(prefix="specray-")  # mode 0700
        self._actors: list[Any] = []
        self._sentinels: list[ray.ObjectRef[None]] = []
        self._channel: Channel | None = None
        self._failure: str | None = None
        try:
            self._actors = self._create(config, with_gpus)
            self._capacity = _first_capacity([actor.start.remote() for actor in self._actors])
            self._channel = self._connect()
            if not with_gpus:  # NCCL looks into the ranks' file again, in the first step
                self._folder.cleanup()
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        assert self._channel is not None
        try:
            self._channel.send(pack(plan))
        except ChannelClosedError:
            raise self._dead() from None

    def collect(self) -> StepResult:
        assert self._channel is not None
        while True:
            try:
                return unpack_result(self._channel.recv(POLL_S))
            except TimeoutError:
                if self.failure() is not None:
                    raise self._dead() from None
            except ChannelClosedError:
                raise self._dead() from None

    def failure(self, timeout: float = 0.0) -> str | None:
        """Why a rank has ended, or None while all live. Any thread may ask."""
        if self._failure is None and self._sentinels:
            ended, _ = ray.wait(self._sentinels, timeout=timeout)
            if ended:
                self._failure = f"rank {self._sentinels.index(ended[0])} of the target {_last_words(ended[0])}"
        return self._failure

    def close(self) -> None:
        """End every rank. May be called twice."""
        if self._channel is not None:
            self._channel.close()
        for actor in self._actors:
            with contextlib.suppress(RayActorError):
                ray.kill(actor)
        self._actors = []
        self._placement.release()
        self._folder.cleanup()

    def _create(self, config: AppConfig, with_gpus: bool) -> list[Any]:
        # Ranks meet through a file: no port to guess, and nobody else can join.
        init_method = f"file://{self._folder.name}/ranks" if config.tp_size > 1 else None
        resources = rank_resources(config, with_gpus)
        engine = config.engine.model_copy(update={"num_threads": rank_threads(config, _num_cores())})
        actor_class = ray.remote(TargetActor)
        return [
            actor_class.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0.0),
                scheduling_strategy=self._placement.strategy(rank),
                runtime_env={"env_vars": rank_environment(config)},
            ).remote(engine, rank, init_method)
            for rank in range(config.tp_size)
        ]

    def _connect(self) -> Channel:
        """Start the ranks' loops; rank 0 calls back on a socket only this user can reach."""
        epoch = secrets.randbits(64)
        address = f"{self._folder.name}/steps"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(address)
            server.listen(1)
            server.settimeout(POLL_S)
            self._sentinels = [actor.loop.remote(address, epoch) for actor in self._actors]
            while True:
                try:
                    return Channel(server.accept()[0], epoch)
                except TimeoutError:
                    if self.failure() is not None:
                        raise self._dead() from None

    def _dead(self) -> EngineDeadError:
        reason = self.failure(LAST_WORDS_S) or "rank 0 of the target closed its connection"
        return EngineDeadError(reason)


def rank_threads(config: AppConfig, num_cores: int) -> int:
    """Compute threads of a rank on CPU: its share of the cores, after one for the processes around it.

    A thread that shares its core with them holds the others up at every barrier: on two cores SmolLM2 streamed
    40 tokens/s with two threads, 55 with one.
    """
    return config.num_threads or max(1, (num_cores - 1) // config.tp_size)


def rank_environment(config: AppConfig) -> dict[str, str]:
    """Environment of a rank: its compute threads, which Ray would set to the CPUs it reserves.

    Its threads wait actively, OpenMP's default: with OMP_WAIT_POLICY=passive each of a step's 150 parallel regions
    begins with a wake-up, and a step of 12.6 ms took 23.4.
    """
    environment = {"OMP_NUM_THREADS": str(rank_threads(config, _num_cores()))}
    if config.tp_size > 1 and sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # ranks share a node; nothing listens beyond it
    return environment


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _first_capacity(starting: list["ray.ObjectRef[Capacity]"]) -> Capacity:
    """Rank 0's capacity once all ranks run. The first failure ends the wait: the others would wait for it for ever."""
    waiting = starting
    while waiting:
        ended, waiting = ray.wait(waiting)
        try:
            ray.get(ended)
        except RayTaskError as error:
            raise _config_error_of(error) from error
    return ray.get(starting[0])


def _config_error_of(error: RayTaskError) -> Exception:
    """The rank's own ConfigError where there is one: its text says what to change."""
    cause = error.cause
    if isinstance(cause, ConfigError):
        return ConfigError(str(cause))
    return EngineDeadError(f"a rank of the target did not start: {type(cause).__name__}: {cause}")


def _last_words(sentinel: "ray.ObjectRef[None]") -> str:
    try:
        ray.get(sentinel)
    except RayTaskError as error:
        logger.error("a rank of the target failed: %s", error)
        return f"failed: {type(error.cause).__name__}"
    except RayActorError:
        return "died"
    return "ended"
