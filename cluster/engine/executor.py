"""The engine's executor over ranks that are Ray actors. Ray starts and monitors them; a unix socket carries steps."""

import contextlib
import logging
import os
import secrets
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from cluster import process_settings
from cluster.config import AppConfig
from cluster.engine.mps import ANOTHER, IN_USE, NO_DAEMON, MpsDaemon, reason_not_started, terminate_client
from cluster.engine.placement import (
    PLACEMENT_TIMEOUT_S,
    Bundle,
    Placement,
    bundles,
    decide_device,
    draft_bundles,
    draft_resources,
    rank_resources,
    uses_gpus,
)
from cluster.engine.rendezvous import file_rendezvous
from cluster.engine.supervisor import DrafterSupervisor
from cluster.engine.target import TargetActor
from cluster.liveness.actors import MPS_FOLDER, RAY_EXIT_S, Place, exit_reason, start_error
from cluster.liveness.watchdog import Watchdogs, ranks_by_node
from specray.channel import Channel, ChannelClosedError
from specray.config import EngineConfig, with_values
from specray.cores import num_cores
from specray.engine.executor import Capacity
from specray.errors import EngineDeadError
from specray.heartbeat import HeartbeatFile, LocalHeartbeat
from specray.private_folders import PREFIX, own, remove_leftovers
from specray.step import TOLERATED_FAULTS, StepPlan, StepResult
from specray.step_wire import pack, unpack_result
from specray.worker.remote_drafter.handshake import DraftEndpoint

POLL_INTERVAL_S = 0.2  # between checks for dead ranks while waiting
EXIT_REASON_TIMEOUT_S = 2.0  # for the exit reason of a rank that closed its socket

logger = logging.getLogger("ray.serve")


class RayExecutor:
    """Implements `specray.engine.executor.Executor` with one actor per rank. Plans are sent to rank 0."""

    def __init__(self, config: AppConfig) -> None:
        config = decide_device(config)
        with_gpus = uses_gpus(config)
        self._placement = Placement(config, with_gpus)
        remove_leftovers(Path(tempfile.gettempdir()))  # of routers that were killed
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)  # mode 0700
        own(Path(self._folder.name))
        self._actors: list[Any] = []
        self._sentinels: list[ray.ObjectRef[None]] = []
        self._watchdogs: Watchdogs | None = None
        self._channel: Channel | None = None
        self._drafter: DrafterSupervisor | None = None
        self.mps = reason_not_started(config, os.environ) or IN_USE  # for /server_info
        self._mps = MpsDaemon(Path(self._folder.name)) if self.mps == IN_USE else None
        self._mps_pipes: str | None = None  # None: actors on GPUs keep their node's environment
        if self._mps is not None:
            self._mps_pipes = self._mps.pipes
        elif self.mps == ANOTHER:
            self._mps_pipes = os.environ[MPS_FOLDER]
        elif config.draft.mps == "off":
            self._mps_pipes = NO_DAEMON
        self._failure: str | None = None
        self._step_timeout_s = config.server.step_timeout_s
        self._epoch = secrets.randbits(64)
        self.rank_nodes: tuple[str, ...] = ()  # address of each rank's node
        try:
            self._actors = self._create(config, with_gpus)
            wanted = bundles(config, with_gpus)
            if self._mps is not None:
                self.mps = self._mps.start([gpu for place in self._places(wanted) for gpu in place.gpus])
            endpoint = self._endpoint(config) if config.has_draft_actor else None
            if endpoint is not None:
                if with_gpus:
                    logger.info("MPS: %s", self.mps)
                if config.draft.cuda_ipc and not endpoint.uses_cuda_ipc:
                    logger.warning("draft.cuda_ipc has no effect without MPS: %s", self.mps)
                resources = draft_resources(config, with_gpus)
                options = [self._options(config, resources, bundle) for bundle in draft_bundles(config)]
                pipes = self._mps_pipes if self.mps in (IN_USE, ANOTHER) else None
                before_kill = partial(terminate_client, pipes) if pipes is not None else lambda _: None
                self._drafter = DrafterSupervisor(_rank_config(config), endpoint, options, before_kill)
            places = self._places(wanted)
            self.rank_nodes = tuple(place.address for place in places)
            self._watchdogs = Watchdogs(Path(self._folder.name), places, self._watchdog_options)
            max_plans = 1 if config.disable_overlap_schedule else 2
            capacity = self._start(places, endpoint)
            # Without graphs, a GPU would have to cut trees by scores, and its steps would start later.
            learns = not with_gpus or capacity.has_graphs
            self._capacity = capacity._replace(max_plans=max_plans, learns_budget=learns)
            if self._drafter is not None:
                self._add_drafter(config, self._drafter, spans_nodes=len(ranks_by_node(places)) > 1)
            self._channel = self._connect()
            if not with_gpus and self._drafter is None:
                # Nothing else uses it. (NCCL reads the rendezvous file in the first step, and new drafters connect.)
                self._folder.cleanup()
        except RayError as error:
            self.close()
            raise start_error("the engine", error) from error
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
        step = LocalHeartbeat()
        step.beat()
        while True:
            try:
                result = unpack_result(self._channel.recv(POLL_INTERVAL_S))
                break
            except TimeoutError:
                if step.is_overdue(self._step_timeout_s):  # all ranks run but are deadlocked
                    self._failure = f"a step did not end within server.step_timeout_s={self._step_timeout_s:g}"
                if self.failure() is not None:
                    raise self._dead() from None
            except ChannelClosedError:
                raise self._dead() from None
        if self._drafter is not None and set(result.draft_faults) - TOLERATED_FAULTS:
            self._drafter.report_fault()
        return result

    def failure(self, timeout: float = 0.0) -> str | None:
        """Why a rank has ended or is given up; None while all run. Thread-safe."""
        if self._failure is None and self._sentinels:
            ended, _ = ray.wait(self._sentinels, timeout=timeout)
            if ended:
                names = [f"rank {rank} of the target" for rank in range(len(self._sentinels))]
                self._failure = exit_reason(names, self._sentinels, "ended")
        if self._failure is None and self._watchdogs is not None:
            self._failure = self._watchdogs.failure()
        if self._failure is None and self._drafter is not None:
            self._failure = self._drafter.failure
        return self._failure

    @property
    def drafter(self) -> DrafterSupervisor:
        """The supervisor of a colocated drafter."""
        assert self._drafter is not None, "the engine has no colocated drafter"
        return self._drafter

    @property
    def drafter_absence(self) -> str:
        """See `DrafterState.absence`; empty without a colocated drafter."""
        return self._drafter.state.absence if self._drafter is not None else ""

    def stop(self) -> None:
        """End an engine whose ranks work.

        They are ended by Ray while they wait for a plan. A rank whose socket closes returns from its task, and if Ray
        ends it at this moment, it reports a bug in itself.
        """
        if self._drafter is not None:
            self._drafter.close()
        for actor in self._actors:
            ray.kill(actor)
        if self._watchdogs is not None:
            self._watchdogs.kill_ranks(RAY_EXIT_S)
        self.close()

    def close(self) -> None:
        """End every rank and the drafter. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        if self._watchdogs is not None:
            self._watchdogs.kill_ranks()  # first, because ray.kill needs Ray's head node, which may be down
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._drafter is not None:
            self._drafter.close()
        self._actors = []
        if self._mps is not None:
            self._mps.close()
        self._placement.release()
        self._folder.cleanup()

    def _create(self, config: AppConfig, with_gpus: bool) -> list[Any]:
        actor_class = ray.remote(TargetActor)
        options = [self._options(config, rank_resources(config, with_gpus, n), n) for n in range(config.tp_size)]
        return [
            actor_class.options(**options[rank]).remote(_rank_config(config), rank) for rank in range(config.tp_size)
        ]

    def _places(self, wanted: list[Bundle]) -> list[Place]:
        """Where the ranks run, once Ray has started all of them. EngineDeadError if it does not."""
        calls: list[ray.ObjectRef[Place]] = [actor.place.remote() for actor in self._actors]
        try:
            return ray.get(calls, timeout=PLACEMENT_TIMEOUT_S)
        except GetTimeoutError:
            raise EngineDeadError(
                f"Ray has not started all ranks in the bundles {wanted} within {PLACEMENT_TIMEOUT_S:g} s; `ray status` "
                "lists what is free"
            ) from None

    def _options(self, config: AppConfig, resources: Bundle, bundle: int) -> dict[str, Any]:
        """Ray's options for an actor in a bundle."""
        environment = rank_environment(config, has_gpu="GPU" in resources)
        if self._mps_pipes is not None and "GPU" in resources:
            environment[MPS_FOLDER] = self._mps_pipes
        return {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0.0),
            "scheduling_strategy": self._placement.bundle(bundle),
            "runtime_env": {"env_vars": environment},
        }

    def _watchdog_options(self, rank: int) -> dict[str, Any]:
        return {"num_cpus": 0, "scheduling_strategy": self._placement.bundle(rank)}

    def _start(self, places: list[Place], endpoint: DraftEndpoint | None) -> Capacity:
        """Load the model in all ranks; rank 0's capacity. Raises on the first failure: the others would wait for it."""
        assert self._watchdogs is not None
        init_method, paths = self._init_method(places), self._watchdogs.heartbeat_paths
        router_path = Path(self._folder.name, "heartbeat-router")
        HeartbeatFile(router_path).keep_beating()
        starting: list[ray.ObjectRef[Capacity]] = [
            actor.start.remote(init_method, paths[rank], str(router_path), endpoint)
            for rank, actor in enumerate(self._actors)
        ]
        waiting = starting
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=POLL_INTERVAL_S)
            for start in ended:
                try:
                    ray.get(start)
                except RayError as error:
                    raise start_error(f"rank {starting.index(start)} of the target", error) from error
            if self.failure() is not None:
                raise self._dead()
        return ray.get(starting[0])

    def _init_method(self, places: list[Place]) -> str | None:
        """torch.distributed's init method: a private file if all ranks are here, else a store on rank 0's node."""
        if len(places) == 1:
            return None
        if len(ranks_by_node(places)) == 1:
            return file_rendezvous(Path(self._folder.name, "ranks"))
        init_method: str = ray.get(self._actors[0].open_store.remote())
        return init_method

    def _endpoint(self, config: AppConfig) -> DraftEndpoint:
        # Without MPS, a target that waits for trees on the GPU would hold it while the drafter needs it.
        shares_memory = config.draft.cuda_ipc and self.mps in (IN_USE, ANOTHER)
        return DraftEndpoint(f"{self._folder.name}/drafts", self._epoch, config.draft_placement, shares_memory)

    def _add_drafter(self, config: AppConfig, supervisor: DrafterSupervisor, spans_nodes: bool) -> None:
        """Start the drafter."""
        handshake = supervisor.start(self._capacity.num_blocks * config.page_size, spans_nodes)
        # The prefix cache cannot change its keys later. Keys for drafters that read the next token suit all drafters.
        reads_next_token = handshake.reads_next_token or config.replaces_drafters
        self._capacity = self._capacity._replace(
            max_draft_tokens=handshake.max_draft_tokens, reads_next_token=reads_next_token
        )

    def _connect(self) -> Channel:
        """Start the ranks' loops. Rank 0 connects to a unix socket that only this user can access."""
        address = f"{self._folder.name}/steps"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(address)
            server.listen(1)
            server.settimeout(POLL_INTERVAL_S)
            self._sentinels = [actor.loop.remote(address, self._epoch) for actor in self._actors]
            while True:
                try:
                    return Channel(server.accept()[0], self._epoch)
                except TimeoutError:
                    if self.failure() is not None:
                        raise self._dead() from None

    def _dead(self) -> EngineDeadError:
        reason = self.failure(EXIT_REASON_TIMEOUT_S) or "rank 0 of the target closed its connection"
        return EngineDeadError(reason)


def _rank_config(config: AppConfig) -> EngineConfig:
    return with_values(config.engine, num_threads=rank_threads(config, num_cores()))


def rank_threads(config: AppConfig, num_cores: int) -> int:
    """Compute threads of a rank on a CPU: its share of the cores, after one of three or more for the other processes.

    A compute thread that shares its core with another process delays all threads at every barrier, but the other
    processes need too little to be worth one of two cores: with one and with two threads SmolLM2 streamed 52 and 75
    tokens/s plain in bfloat16, 168 and 207 with 4-bit weights, and 88 and 110 with EAGLE-3 in bfloat16.
    """
    return config.num_threads or max(1, max(num_cores - 1, min(num_cores, 2)) // config.tp_size)


def rank_environment(config: AppConfig, has_gpu: bool) -> dict[str, str]:
    """Environment of a rank: its log level, compute threads (Ray would set the CPUs it reserves) and priority.

    OMP_WAIT_POLICY keeps its active default. With passive waiting, each of a step's 150 parallel regions wakes up its
    threads, and a step of 12.6 ms took 23.4 ms.
    """
    environment = {
        "OMP_NUM_THREADS": str(rank_threads(config, num_cores())),
        process_settings.LOG_LEVEL: config.server.log_level,
    }
    if not has_gpu:
        environment[process_settings.NICENESS] = str(process_settings.COMPUTING_NICENESS)
    return environment
