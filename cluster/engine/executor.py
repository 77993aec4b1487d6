"""The engine's door to ranks that are Ray actors: Ray starts and watches them, a socket carries the steps.

Not here: where they run (`placement`), what they run (`target`), what a step is (`specray.step`).
"""

import contextlib
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from cluster import log_level
from cluster.config import AppConfig
from cluster.engine.draft import DrafterSupervisor
from cluster.engine.placement import Bundle, Placement, draft_resources, rank_resources, uses_gpus
from cluster.engine.rendezvous import meeting_file
from cluster.engine.target import TargetActor
from cluster.liveness.actors import Place, exit_reason, start_error
from cluster.liveness.heartbeat import Heartbeat
from cluster.liveness.watchdog import Watchdogs, ranks_by_node
from specray.channel import Channel, ChannelClosedError
from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.errors import EngineDeadError
from specray.step import DraftFault, StepPlan, StepResult, pack, unpack_result
from specray.worker.remote_drafter.handshake import DraftEndpoint

POLL_S = 0.2  # how soon a dead rank is noticed while another one is waited for
FORGIVEN = {DraftFault.LATE, DraftFault.NO_HANDSHAKE}  # the target keeps the drafter that it has
LAST_WORDS_S = 2.0  # how long a closed socket's rank is given to say why


class RayExecutor:
    """Starts one actor per rank and runs plans on rank 0; an `Executor` of the engine."""

    def __init__(self, config: AppConfig) -> None:
        with_gpus = uses_gpus(config)
        self._placement = Placement(config, with_gpus)
        self._folder = tempfile.TemporaryDirectory(prefix="specray-")  # mode 0700
        self._actors: list[Any] = []
        self._sentinels: list[ray.ObjectRef[None]] = []
        self._watchdogs: Watchdogs | None = None
        self._channel: Channel | None = None
        self._drafter: DrafterSupervisor | None = None
        self._failure: str | None = None
        self._step_timeout_s = config.server.step_timeout_s
        self._epoch = secrets.randbits(64)
        self.rank_nodes: tuple[str, ...] = ()  # addresses of the nodes that the ranks run on
        try:
            self._actors = self._create(config, with_gpus)
            if config.has_draft_actor:
                options = self._options(config, draft_resources(config, with_gpus), rank=0)
                self._drafter = DrafterSupervisor(_rank_config(config), self._endpoint, options)
            places: list[Place] = ray.get([actor.place.remote() for actor in self._actors])
            self.rank_nodes = tuple(place.address for place in places)
            self._watchdogs = Watchdogs(Path(self._folder.name), places, self._watchdog_options)
            self._capacity = self._start(places)
            if self._drafter is not None:
                self._add_drafter(config, self._drafter)
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
        deadline = time.monotonic() + self._step_timeout_s
        while True:
            try:
                return self._noted(unpack_result(self._channel.recv(POLL_S)))
            except TimeoutError:
                if time.monotonic() > deadline:  # every rank lives, and one waits for another that did not join in
                    self._failure = f"a step did not end within server.step_timeout_s={self._step_timeout_s:g}"
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
                self._failure = f"{rank} {exit_reason(rank, ended[0], 'ended')}"
        if self._failure is None and self._watchdogs is not None:
            self._failure = self._watchdogs.failure()
        return self._failure

    @property
    def drafter(self) -> DrafterSupervisor:
        """Whoever keeps the drafter, where drafters have processes of their own."""
        assert self._drafter is not None, "drafts are made in the rank's process, or nothing is ever to draft"
        return self._drafter

    def close(self) -> None:
        """End every rank and the drafter. May be called twice."""
        if self._channel is not None:
            self._channel.close()
        if self._watchdogs is not None:
            self._watchdogs.end()  # first: Ray asks through its head, which may not be there
        for actor in self._actors:
            with contextlib.suppress(RayActorError):
                ray.kill(actor)
        if self._drafter is not None:
            self._drafter.close()
        self._actors = []
        self._placement.release()
        self._folder.cleanup()

    def _create(self, config: AppConfig, with_gpus: bool) -> list[Any]:
        endpoint = self._endpoint if config.has_draft_actor else None
        actor_class = ray.remote(TargetActor)
        options = [self._options(config, rank_resources(config, with_gpus, n), n) for n in range(config.tp_size)]
        return [
            actor_class.options(**options[rank]).remote(_rank_config(config), rank, endpoint)
            for rank in range(config.tp_size)
        ]

    def _options(self, config: AppConfig, resources: Bundle, rank: int) -> dict[str, Any]:
        """Ray's options of an actor in a rank's bundle."""
        return {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0.0),
            "scheduling_strategy": self._placement.bundle(rank),
            "runtime_env": {"env_vars": rank_environment(config)},
        }

    def _watchdog_options(self, rank: int) -> dict[str, Any]:
        return {"num_cpus": 0, "scheduling_strategy": self._placement.bundle(rank)}

    def _start(self, places: list[Place]) -> Capacity:
        """Rank 0's capacity once all ranks run. The first failure ends the wait: the others would wait for it."""
        assert self._watchdogs is not None
        meeting, paths = self._meeting(places), self._watchdogs.heartbeat_paths
        own_path = Path(self._folder.name, "pulse-router")
        Heartbeat(own_path).keep_beating()
        starting: list[ray.ObjectRef[Capacity]] = [
            actor.start.remote(meeting, paths[rank], str(own_path)) for rank, actor in enumerate(self._actors)
        ]
        waiting = starting
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=POLL_S)
            try:
                ray.get(ended)
            except RayTaskError as error:
                raise start_error("a rank of the target", error) from error
            if self.failure() is not None:
                raise self._dead()
        return ray.get(starting[0])

    def _meeting(self, places: list[Place]) -> str | None:
        """Where the ranks meet: in our folder if all are here, else in a store on rank 0's node."""
        if len(places) == 1:
            return None
        if len(ranks_by_node(places)) == 1:
            return meeting_file(Path(self._folder.name))
        meeting: str = ray.get(self._actors[0].open_store.remote())
        return meeting

    @property
    def _endpoint(self) -> DraftEndpoint:
        return DraftEndpoint(f"{self._folder.name}/drafts", self._epoch)

    def _add_drafter(self, config: AppConfig, supervisor: DrafterSupervisor) -> None:
        """Have a drafter beside rank 0, which drafts for the group."""
        supervisor.start(self._capacity.num_blocks * config.page_size)
        handshake = supervisor.replace(config.speculative)
        # The prefix cache cannot change its keys later, and those of the drafters that ask more of it do for all.
        reads_next_token = handshake.reads_next_token or config.replaces_drafters
        self._capacity = self._capacity._replace(
            max_draft_tokens=handshake.max_draft_tokens, reads_next_token=reads_next_token
        )

    def _noted(self, result: StepResult) -> StepResult:
        """A result, after its news of the drafter reached the keeper."""
        if self._drafter is not None and set(result.draft_faults) - FORGIVEN:
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
    """Environment of a rank: its log level, and its compute threads, which Ray would set to the CPUs it reserves.

    Its threads wait actively, OpenMP's default: with OMP_WAIT_POLICY=passive each of a step's 150 parallel regions
    begins with a wake-up, and a step of 12.6 ms took 23.4.
    """
    return {
        "OMP_NUM_THREADS": str(rank_threads(config, _num_cores())),
        log_level.VARIABLE: config.server.log_level,
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
