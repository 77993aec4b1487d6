"""The engine's door to ranks that are Ray actors: Ray starts and watches them, a socket carries the steps.

Not here: where they run (`placement`), what they run (`target`), what a step is (`specray.step`).
"""

import contextlib
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from cluster.actors import last_words, start_error
from cluster.config import AppConfig
from cluster.draft import DraftKeeper
from cluster.placement import Bundle, Placement, draft_resources, rank_resources, uses_gpus
from cluster.processes import Process, Pulse
from cluster.target import TargetActor
from specray.channel import Channel, ChannelClosedError
from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.errors import EngineDeadError
from specray.step import DraftFault, StepPlan, StepResult, pack, unpack_result

POLL_S = 0.2  # how soon a dead rank is noticed while another one is waited for
FROZEN_S = 3.0  # a rank that has not run for so long is given up, and its group with it
LAST_WORDS_S = 2.0  # how long a closed socket's rank is given to say why


class RayExecutor:
    """Starts one actor per rank and runs plans on rank 0; an `Executor` of the engine."""

    def __init__(self, config: AppConfig) -> None:
        with_gpus = uses_gpus(config)
        self._placement = Placement(config, with_gpus)
        self._folder = tempfile.TemporaryDirectory(prefix="specray-")  # mode 0700
        self._actors: list[Any] = []
        self._sentinels: list[ray.ObjectRef[None]] = []
        self._processes: list[Process] = []
        self._pulses = [Pulse(Path(self._pulse_path(rank))) for rank in range(config.tp_size)]
        self._channel: Channel | None = None
        self._drafter: DraftKeeper | None = None
        self._failure: str | None = None
        self._epoch = secrets.randbits(64)
        try:
            self._actors = self._create(config, with_gpus)
            self._processes = [Process(ray.get(actor.pid.remote())) for actor in self._actors]
            self._capacity = _first_capacity([actor.start.remote() for actor in self._actors])
            if config.has_draft_actor:
                self._add_drafter(config, with_gpus)
            self._channel = self._connect()
            if not with_gpus and self._drafter is None:
                # Nobody comes by any more. (NCCL looks into the ranks' file in the first step, new drafters knock.)
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
                return self._noted(unpack_result(self._channel.recv(POLL_S)))
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
                rank = f"rank {self._sentinels.index(ended[0])} of the target"
                self._failure = f"{rank} {last_words(rank, ended[0], 'ended')}"
            for number, pulse in enumerate(self._pulses):
                if self._failure is None and pulse.silence() > FROZEN_S:
                    self._failure = f"rank {number} of the target has not run for {pulse.silence():.1f} s"
        return self._failure

    def close(self) -> None:
        """End every rank and the drafter. May be called twice."""
        if self._drafter is not None:
            self._drafter.close()
        if self._channel is not None:
            self._channel.close()
        for actor in self._actors:
            with contextlib.suppress(RayActorError):
                ray.kill(actor)
        for process in self._processes:
            process.kill()
        self._actors, self._processes = [], []
        self._placement.release()
        self._folder.cleanup()

    def _create(self, config: AppConfig, with_gpus: bool) -> list[Any]:
        # Ranks meet through a file: no port to guess, and nobody else can join.
        init_method = f"file://{self._folder.name}/ranks" if config.tp_size > 1 else None
        doorbell = self._doorbell if config.has_draft_actor else None
        actor_class, resources = ray.remote(TargetActor), rank_resources(config, with_gpus)
        return [
            actor_class.options(**self._options(config, resources, rank)).remote(
                _rank_config(config), rank, init_method, doorbell, self._pulse_path(rank)
            )
            for rank in range(config.tp_size)
        ]

    def _options(self, config: AppConfig, resources: Bundle, rank: int) -> dict[str, Any]:
        """Ray's options of an actor in a rank's bundle."""
        return {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0.0),
            "scheduling_strategy": self._placement.strategy(rank),
            "runtime_env": {"env_vars": rank_environment(config)},
        }

    def _pulse_path(self, rank: int) -> str:
        return f"{self._folder.name}/pulse-{rank}"

    @property
    def _doorbell(self) -> tuple[str, int]:
        return f"{self._folder.name}/drafts", self._epoch

    def _add_drafter(self, config: AppConfig, with_gpus: bool) -> None:
        """Start the drafter beside rank 0, which drafts for the group."""
        options = self._options(config, draft_resources(config, with_gpus), rank=0)
        num_slots = self._capacity.num_blocks * config.page_size
        self._drafter = DraftKeeper(_rank_config(config), num_slots, *self._doorbell, options)
        max_draft_tokens, reads_next_token = self._drafter.start()
        self._capacity = self._capacity._replace(max_draft_tokens=max_draft_tokens, reads_next_token=reads_next_token)

    def _noted(self, result: StepResult) -> StepResult:
        """A result, after its news of the drafter reached the keeper."""
        if self._drafter is not None and any(kind != DraftFault.LATE for kind in result.draft_faults):
            self._drafter.give_up()
        return result

    def _connect(self) -> Channel:
        """Start the ranks' loops; rank 0 calls back on a socket only this user can reach."""
        address = f"{self._folder.name}/steps"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(address)
            server.listen(1)
            server.settimeout(POLL_S)
            self._sentinels = [actor.loop.remote(address, self._epoch) for actor in self._actors]
            while True:
                try:
                    return Channel(server.accept()[0], self._epoch)
                except TimeoutError:
                    if self.failure() is not None:
                        raise self._dead() from None

    def _dead(self) -> EngineDeadError:
        reason = self.failure(LAST_WORDS_S) or "rank 0 of the target closed its connection"
        return EngineDeadError(reason)


def _rank_config(config: AppConfig) -> EngineConfig:
    return config.engine.model_copy(update={"num_threads": rank_threads(config, _num_cores())})


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
            raise start_error("a rank of the target", error) from error
    return ray.get(starting[0])
