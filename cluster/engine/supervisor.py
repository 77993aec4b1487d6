"""Supervision of an engine's drafter: start, monitoring, restart and replacement.

It is one process, or one beside each rank, each with a part of the draft model: they start, fail and end together.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from cluster.engine.draft import DraftActor
from cluster.engine.rendezvous import file_rendezvous
from cluster.liveness.actors import RAY_EXIT_S, Process, exit_reason, start_error
from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.errors import EngineDeadError
from specray.heartbeat import HeartbeatFile, SilenceWatch
from specray.spec_decode import splits_draft_models
from specray.worker.remote_drafter.handshake import NO_DRAFTER, DraftEndpoint, DrafterHandshake, dismiss

POLL_INTERVAL_S = 0.25
ACCEPTANCE_POLL_S = 0.02  # between checks whether the target has accepted a drafter
MIN_BACKOFF_S = 0.5  # before a restart; doubled after every drafter that did not last
MAX_BACKOFF_S = 15.0
STABLE_AFTER_S = 30.0  # the end of a drafter that ran for longer resets the backoff
FIRST_HEARTBEAT_TIMEOUT_S = 60.0  # after the actor's creation
LOADING_FROZEN_S = 20.0  # deadline of the heartbeat while it loads; later the target detects a frozen drafter
SWITCH_TIMEOUT_S = 10.0  # for the target to drop a drafter in its next step; idle engines run one every few seconds

CLOSING = "the engine is shutting down"

logger = logging.getLogger("ray.serve")


class DrafterState(NamedTuple):
    """The state of an engine's drafter, for operators."""

    state: str  # "off", "ready", or "loading": it is being started or connects, and steps run without drafts
    speculative: SpeculativeConfig
    loading: SpeculativeConfig | None  # options of the drafter that will replace it
    num_restarts: int  # restarts of all drafters of this engine
    absence: str = ""  # why there is no drafter at present; empty if it drafts, or is off


class _Replacement(NamedTuple):
    config: EngineConfig
    target_runs: bool  # steps, in which it accepts drafters
    result: Future[DrafterHandshake]


class DrafterSupervisor:
    """Restarts an engine's drafter when it ends, and replaces it on request.

    `options` are the Ray options of an actor for each rank; a drafter without a model to split has the first one only.
    `before_kill` is called with the ID of each process on this node that runs when it is ended.

    One thread does all of this. `start` starts it and waits for the first drafter, whose process is created by the
    constructor already, so that it starts at the same time as the target.
    """

    def __init__(
        self,
        config: EngineConfig,
        endpoint: DraftEndpoint,
        options: Sequence[dict[str, Any]],
        before_kill: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._configured, self._before_kill = config, before_kill
        self._config = with_values(config, speculative=SpeculativeConfig())
        self._num_slots = 0
        self._endpoint = endpoint
        self._actor_classes = [ray.remote(DraftActor).options(**each) for each in options]
        self._spans_nodes = False
        self._num_created = 0
        self._first = self._create(config) if config.speculative.has_drafter else None
        self._drafter: _DrafterProcesses | None = None
        self._num_restarts = 0
        self._end_reason = ""  # of the last drafter that did not last
        self.failure: str | None = None  # of the supervision itself, after which no drafter is started
        self._backoff_s = MIN_BACKOFF_S
        self._replacement: _Replacement | None = None
        self._replacing = threading.Lock()
        self._has_faulted = threading.Event()
        self._is_closing = threading.Event()
        self._wake = threading.Event()  # set when there is a replacement, or on closing
        self._thread = threading.Thread(target=self._run, name="specray-drafter-supervisor", daemon=True)

    def start(self, num_slots: int, spans_nodes: bool = False) -> DrafterHandshake:
        """Load the configured drafter, for a target with `num_slots` KV slots that will run its first step later.

        `spans_nodes`: the actors are on several nodes. Raises what `replace` raises.
        """
        self._num_slots, self._spans_nodes = num_slots, spans_nodes
        self._thread.start()
        return self._await(_Replacement(self._configured, target_runs=False, result=Future()))

    @property
    def state(self) -> DrafterState:
        speculative, replacement = self._config.speculative, self._replacement
        loading = replacement.config.speculative if replacement is not None else None
        if not speculative.has_drafter:
            return DrafterState("off", speculative, loading, self._num_restarts)
        drafter = self._drafter
        if drafter is not None and drafter.is_accepted:
            return DrafterState("ready", speculative, loading, self._num_restarts)
        absence = self._end_reason or "the drafter is being started"
        return DrafterState("loading", speculative, loading, self._num_restarts, absence)

    def replace(self, speculative: SpeculativeConfig) -> DrafterHandshake:
        """Load a drafter beside the current one, switch to it between two steps, and end the current one.

        Without an algorithm, drafting is turned off. Blocks until the target has accepted the new drafter, and returns
        its handshake. Raises ConfigError if the drafter does not fit the target, and EngineDeadError if it does not
        start or is refused; the current drafter then continues.
        """
        config = with_values(self._config, speculative=speculative)
        return self._await(_Replacement(config, target_runs=True, result=Future()))

    def _await(self, replacement: _Replacement) -> DrafterHandshake:
        with self._replacing:
            self._replacement = replacement
            self._wake.set()
            try:
                if self._is_closing.is_set():  # checked after the assignment, which the thread reads when it closes
                    raise EngineDeadError(self.failure or CLOSING)
                return replacement.result.result()
            finally:
                self._replacement = None

    def keep(self, speculative: SpeculativeConfig) -> None:
        """Take over options that change nothing for the running drafter, such as which requests get it."""
        with self._replacing:
            self._config = with_values(self._config, speculative=speculative)

    def report_fault(self) -> None:
        """Restart the drafter, because the target has dropped it. Thread-safe."""
        self._has_faulted.set()

    def close(self) -> None:
        """End the drafter, and any that is loading."""
        self._is_closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        _end(self._first, RAY_EXIT_S)

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception as error:
            logger.exception("the supervision of the drafter failed")
            self.failure = f"the supervision of the drafter failed: {type(error).__name__}: {error}"
        self._is_closing.set()
        _end(self._drafter, RAY_EXIT_S)
        if self._replacement is not None and not self._replacement.result.done():
            self._replacement.result.set_exception(EngineDeadError(self.failure or CLOSING))

    def _supervise(self) -> None:
        while True:
            reason = self._monitor()
            if self._is_closing.is_set():
                return
            if reason is not None:
                self._restart(reason)
            elif self._replacement is not None and not self._replacement.result.done():
                self._replace(self._replacement)

    def _monitor(self) -> str | None:
        """Wait until the drafter must be restarted, and return why; None if woken up for something else."""
        while not self._wake.wait(POLL_INTERVAL_S):
            if not self._config.speculative.has_drafter:
                continue
            if self._drafter is None:
                return "drafter did not start"
            if self._has_faulted.is_set() and self._drafter.is_accepted:
                return "drafter was dropped by its target"
            self._has_faulted.clear()  # of the drafter before; an idle target notices its end late
            if self._drafter.has_ended():
                return self._drafter.exit_reason()
        self._wake.clear()
        return None

    def _restart(self, reason: str) -> None:
        age_s = self._drafter.age_s if self._drafter is not None else 0.0
        logger.warning("the %s after %.1f s; restarting it", reason, age_s)
        self._end_reason = f"the last {reason}"
        _end(self._drafter)
        self._drafter = None
        self._backoff_s = MIN_BACKOFF_S if age_s > STABLE_AFTER_S else min(2 * self._backoff_s, MAX_BACKOFF_S)
        if self._wake.wait(self._backoff_s):
            return
        try:
            self._drafter, _ = self._start(self._config, lambda: not self._wake.is_set())
            self._num_restarts += 1
            logger.warning("the drafter was restarted")
        except RayError as error:
            self._end_reason = str(start_error("the drafter", error))
            logger.error("the drafter did not start: %s", error)
        except OSError as error:
            self._end_reason = f"the drafter did not start: {error}"
            logger.error("the drafter did not start: %s", error)
        except _CancelledError:
            return

    def _replace(self, replacement: _Replacement) -> None:
        try:
            handshake = self._switch(replacement)
        except RayError as error:
            replacement.result.set_exception(start_error("the drafter", error))
        except EngineDeadError as error:
            replacement.result.set_exception(error)
        except (OSError, _CancelledError) as error:
            replacement.result.set_exception(EngineDeadError(f"the drafter did not start: {type(error).__name__}"))
        else:
            replacement.result.set_result(handshake)

    def _switch(self, replacement: _Replacement) -> DrafterHandshake:
        old, handshake, is_wanted = self._drafter, NO_DRAFTER, lambda: not self._is_closing.is_set()
        if replacement.config.speculative.has_drafter:
            new, handshake = self._start(replacement.config, is_wanted)
            if replacement.target_runs:
                new.await_acceptance(is_wanted)
            self._has_faulted.clear()  # faults reported so far were those of the old drafter
            self._drafter, self._config = new, replacement.config
            self._backoff_s, self._end_reason = MIN_BACKOFF_S, ""
            if old is not None:
                old.await_end(SWITCH_TIMEOUT_S)
        else:
            self._drafter, self._config = None, replacement.config
            if old is not None:
                with contextlib.suppress(OSError):  # the target runs no step or has ended, so it uses no drafter
                    dismiss(self._endpoint, SWITCH_TIMEOUT_S)
        _end(old, RAY_EXIT_S)
        return handshake

    def _start(
        self, config: EngineConfig, is_wanted: Callable[[], bool]
    ) -> tuple["_DrafterProcesses", DrafterHandshake]:
        """A loaded drafter that is about to connect to the target. Raises RayError, OSError or _CancelledError."""
        drafter, self._first = self._first or self._create(config), None
        try:
            handshake = drafter.load(self._num_slots, self._spans_nodes, is_wanted)
        except BaseException:
            drafter.end()
            raise
        self._has_faulted.clear()  # faults reported so far were those of an earlier drafter
        drafter.connect(self._endpoint)
        return drafter, handshake

    def _create(self, config: EngineConfig) -> "_DrafterProcesses":
        self._num_created += 1
        classes = self._actor_classes if splits_draft_models(config.speculative) else self._actor_classes[:1]
        folder, number = Path(self._endpoint.address).parent, self._num_created
        paths = [folder / f"heartbeat-drafter-{number}-{rank}" for rank in range(len(classes))]
        heartbeats = [HeartbeatFile(path) for path in paths]  # made before the actors look for them
        actors = [each.remote(config, str(paths[rank]), rank) for rank, each in enumerate(classes)]
        return _DrafterProcesses(heartbeats, actors, folder / f"ranks-drafter-{number}", self._before_kill)


class _CancelledError(Exception):
    """The drafter that was loading is no longer wanted."""


class _DrafterProcesses:
    """The processes of one drafter, from the creation of their actors until their end.

    Those on this node have heartbeats, and the first one is on this node. Without any of the others it cannot draft, so
    that it is late and then frozen.
    """

    def __init__(
        self,
        heartbeats: Sequence[HeartbeatFile],
        actors: Sequence[Any],
        rendezvous: Path,
        before_kill: Callable[[int], None],
    ) -> None:
        """`rendezvous` is a new file for actors of one node to meet."""
        self._heartbeats, self._before_kill = heartbeats, before_kill
        self._actors, self._rendezvous = actors, rendezvous
        self._processes: dict[int, Process] = {}  # by rank, those on this node
        self._sentinels: list[ray.ObjectRef[None]] = []
        self._created_at = time.monotonic()
        self._silences = [SilenceWatch(heartbeat, POLL_INTERVAL_S) for heartbeat in heartbeats]

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._created_at

    def load(self, num_slots: int, spans_nodes: bool, is_wanted: Callable[[], bool]) -> DrafterHandshake:
        """RayError if loading fails, TimeoutError if it freezes, _CancelledError once `is_wanted` returns False."""
        group = self._init_method(spans_nodes), len(self._actors)
        calls = [actor.start.remote(num_slots, *group) for actor in self._actors]
        waiting = calls
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=POLL_INTERVAL_S)
            for call in ended:
                ray.get(call)
            self._open_processes()
            if waiting and not is_wanted():
                raise _CancelledError
            if waiting:
                self._check_heartbeats()
        handshake: DrafterHandshake = ray.get(calls[0])
        return handshake

    def connect(self, endpoint: DraftEndpoint) -> None:
        """Connect to the target and start drafting once it accepts."""
        self._sentinels = [actor.loop.remote(endpoint.address, endpoint.epoch) for actor in self._actors]

    def await_acceptance(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until the target has accepted it, which takes as long as the target's present step.

        Ends the process and raises EngineDeadError if the target refuses it or it ends, TimeoutError if it freezes,
        _CancelledError once `is_wanted` returns False.
        """
        try:
            while not self.is_accepted:
                if self.await_end(ACCEPTANCE_POLL_S) and not self.is_accepted:
                    raise EngineDeadError(f"the {self.exit_reason()}")
                if not is_wanted():
                    raise _CancelledError
                self._check_heartbeats()
        except BaseException:
            self.end()
            raise

    @property
    def is_accepted(self) -> bool:
        """Whether the target has accepted it."""
        return self._heartbeats[0].has_loaded

    def has_ended(self) -> bool:
        return self.await_end(0.0)

    def await_end(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until one ends, by an error or dropped by the target; whether it did."""
        return bool(ray.wait(self._sentinels, timeout=timeout)[0])

    def exit_reason(self) -> str:
        """Which process ended and why, without an article: "drafter died"."""
        ranks = range(len(self._sentinels))
        names = ["drafter"] if len(ranks) == 1 else [f"drafter's rank {rank}" for rank in ranks]
        return exit_reason(names, self._sentinels, "was dropped by its target")

    def end(self, grace_s: float = 0.0) -> None:
        """End the processes, and kill those on this node unless they end within `grace_s` seconds. Idempotent."""
        for process in self._processes.values():
            if process.is_running:
                self._before_kill(process.pid)
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        for process in self._processes.values():
            process.kill(grace_s)

    def _init_method(self, spans_nodes: bool) -> str | None:
        """torch.distributed's init method of several actors; see RayExecutor."""
        if len(self._actors) == 1:
            return None
        if not spans_nodes:
            return file_rendezvous(self._rendezvous)
        opened: str = ray.get(self._actors[0].open_store.remote(), timeout=FIRST_HEARTBEAT_TIMEOUT_S)
        return opened

    def _open_processes(self) -> None:
        """Open the processes while they run, before their IDs can be reused."""
        for rank, heartbeat in enumerate(self._heartbeats):
            if rank not in self._processes and heartbeat.pid is not None:
                self._processes[rank] = Process(heartbeat.pid)

    def _check_heartbeats(self) -> None:
        for rank, (heartbeat, silence) in enumerate(zip(self._heartbeats, self._silences, strict=True)):
            if heartbeat.pid is not None and (silence_s := silence.poll()) > LOADING_FROZEN_S:
                raise TimeoutError(f"its rank {rank} has not run for {silence_s:.0f} s")
        if self._heartbeats[0].pid is None and self.age_s > FIRST_HEARTBEAT_TIMEOUT_S:
            raise TimeoutError(f"its process has not started in {self.age_s:.0f} s")


def _end(drafter: _DrafterProcesses | None, grace_s: float = 0.0) -> None:
    if drafter is not None:
        drafter.end(grace_s)
