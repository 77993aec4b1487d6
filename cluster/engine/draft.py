"""The drafter's process, and the life of it: started beside its target rank, watched, ended, started again, replaced.

What the drafter says to its target is in `specray.worker.remote_drafter`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.engine.garbage import all_that_stays
from cluster.liveness.actors import exit_reason, start_error
from cluster.liveness.heartbeat import Heartbeat, Process
from cluster.log_level import set_log_level_from_environment
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError, EngineDeadError
from specray.worker.remote_drafter.handshake import NOBODY, DraftEndpoint, DrafterHandshake, dismiss

if TYPE_CHECKING:
    from specray.spec_decode.drafter import TargetView

FIRST_PAUSE_S = 0.5  # before a new start; twice as long after every start that did not last
LONGEST_PAUSE_S = 15.0
LASTING_S = 30.0  # a drafter that lived so long died of something new
WATCH_S = 0.25
UNBORN_S = 60.0  # a process without a sign of life for so long will give none
FROZEN_S = 20.0  # one that loads may hold its interpreter for seconds; those that draft are given up much sooner
SWITCH_S = 10.0  # in which the target takes its next step; an idle engine takes one every few seconds

CLOSING = "the engine is shutting down"

logger = logging.getLogger("ray.serve")


class DraftActor:
    """A Ray actor. `start` once, then `loop`: its end is the end of the drafter."""

    def __init__(self, config: EngineConfig, heartbeat: str) -> None:
        """From now on the file `heartbeat` beats."""
        set_log_level_from_environment()
        Heartbeat(Path(heartbeat)).keep_beating()
        self._config = config
        # Seconds, which the first drafter of an engine spends while its target loads; what is wrong, `start` says.
        self._target = ThreadPoolExecutor(1).submit(_look_at_target, config)

    def start(self, num_slots: int) -> DrafterHandshake:
        """Load the drafter for a target with so many KV slots."""
        target = self._target.result()
        import torch

        from specray.worker.memory import enough_memory
        from specray.worker.remote_drafter.server import DraftServer, far_drafter

        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        with all_that_stays(), enough_memory(self._config, "loading the drafter", ConfigError):
            self._worker = DraftServer(far_drafter(self._config, target, num_slots), target.device)
        return self._worker.handshake

    def loop(self, address: str, epoch: int) -> None:
        """Draft for the target behind the socket at `address` until one of the two is gone."""
        self._worker.serve(address, epoch)


def _look_at_target(config: EngineConfig) -> "TargetView":
    with all_that_stays():
        # Here, not above: the router imports this module, and torch must stay out of its process.
        from specray.worker.remote_drafter.server import far_view

        return far_view(config)


class DrafterState(NamedTuple):
    """What drafts for an engine, as an operator sees it."""

    state: str  # off, ready, or loading: it is (again) being started, and nobody drafts meanwhile
    speculative: SpeculativeConfig
    loading: SpeculativeConfig | None  # of a drafter that is to take its place
    num_restarts: int  # of all drafters of this engine


class _DesiredDrafter(NamedTuple):
    config: EngineConfig
    granted: Future[DrafterHandshake]


class DrafterSupervisor:
    """Keeps an engine's drafter alive and puts another one in its place; `options` are Ray's for the actor.

    All that happens to a drafter is done by one thread, which `start` starts; there is no drafter before `replace`.
    The process of the first one, `config`'s, comes up at once: it takes as long as the target's, beside it.
    """

    def __init__(self, config: EngineConfig, endpoint: DraftEndpoint, options: dict[str, Any]) -> None:
        self._config = config.model_copy(update={"speculative": SpeculativeConfig()})
        self._num_slots = 0
        self._endpoint = endpoint
        self._actor_class = ray.remote(DraftActor).options(**options)
        self._num_created = 0
        self._first = None if config.speculative.algorithm is None else self._create(config)
        self._drafter: _Drafter | None = None
        self._num_restarts = 0
        self._pause = FIRST_PAUSE_S
        self._desired: _DesiredDrafter | None = None
        self._wishing = threading.Lock()  # held by whoever has a wish
        self._given_up = threading.Event()
        self._closing = threading.Event()
        self._called = threading.Event()  # there is a wish, or we close
        self._thread = threading.Thread(target=self._keep, name="specray-draft-keeper", daemon=True)

    def start(self, num_slots: int) -> None:
        """From now on there may be drafters, for a target with so many KV slots."""
        self._num_slots = num_slots
        self._thread.start()

    @property
    def state(self) -> DrafterState:
        speculative, desired = self._config.speculative, self._desired
        loading = desired.config.speculative if desired is not None else None
        state = "off" if speculative.algorithm is None else "loading" if self._drafter is None else "ready"
        return DrafterState(state, speculative, loading, self._num_restarts)

    def replace(self, speculative: SpeculativeConfig) -> DrafterHandshake:
        """Load this drafter beside the one there is, switch to it between two steps, and end the other one.

        Without an algorithm, nobody drafts any more. Returns when that is done; the new drafter's hello. ConfigError if
        it does not fit the target, EngineDeadError if it does not start; then the old one goes on.
        """
        with self._wishing:
            desired = _DesiredDrafter(self._config.model_copy(update={"speculative": speculative}), Future())
            self._desired = desired
            self._called.set()
            try:
                if self._closing.is_set():  # asked for only now: whoever closes later finds the wish
                    raise EngineDeadError(CLOSING)
                return desired.granted.result()
            finally:
                self._desired = None

    def give_up(self) -> None:
        """The target has dismissed the drafter; a new one is started. Any thread may say so."""
        self._given_up.set()

    def close(self) -> None:
        """End the drafter, one that is being loaded included."""
        self._closing.set()
        self._called.set()
        if self._thread.is_alive():
            self._thread.join()
        _end(self._first)

    def _keep(self) -> None:
        while True:
            reason = self._watch()
            if self._closing.is_set():
                break
            if reason is not None:
                self._restart(reason)
            elif self._desired is not None and not self._desired.granted.done():
                self._grant(self._desired)
        _end(self._drafter)
        if self._desired is not None and not self._desired.granted.done():
            self._desired.granted.set_exception(EngineDeadError(CLOSING))

    def _watch(self) -> str | None:
        """Wait until the drafter has to be started again: why; None if something else is to be done."""
        while not self._called.wait(WATCH_S):
            if self._config.speculative.algorithm is None:
                continue
            if self._drafter is None:
                return "did not start"
            if self._given_up.is_set():
                return "was given up by its target"
            if self._drafter.has_ended():
                return self._drafter.exit_reason()
        self._called.clear()
        return None

    def _restart(self, reason: str) -> None:
        age = self._drafter.age if self._drafter is not None else 0.0
        logger.warning("the drafter %s after %.1f s; a new one is started", reason, age)
        _end(self._drafter)
        self._drafter = None
        self._pause = FIRST_PAUSE_S if age > LASTING_S else min(2 * self._pause, LONGEST_PAUSE_S)
        if self._called.wait(self._pause):
            return
        try:
            self._drafter, _ = self._start(self._config, lambda: not self._called.is_set())
            self._num_restarts += 1
            logger.warning("a new drafter is ready")
        except (RayError, OSError) as error:
            logger.error("the drafter did not start: %s", error)
        except _AbandonedError:
            return

    def _grant(self, desired: _DesiredDrafter) -> None:
        try:
            handshake = self._switch(desired.config)
        except RayTaskError as error:
            desired.granted.set_exception(start_error("the drafter", error))
        except (RayError, OSError, _AbandonedError) as error:  # Ray's own words are long and full of addresses
            desired.granted.set_exception(EngineDeadError(f"the drafter did not start: {type(error).__name__}"))
        else:
            desired.granted.set_result(handshake)

    def _switch(self, config: EngineConfig) -> DrafterHandshake:
        old, handshake = self._drafter, NOBODY
        if config.speculative.algorithm is not None:
            self._drafter, handshake = self._start(config, lambda: not self._closing.is_set())
            self._config, self._pause = config, FIRST_PAUSE_S
            if old is not None:
                old.await_end(SWITCH_S)
        else:
            self._drafter, self._config = None, config
            if old is not None:
                with contextlib.suppress(OSError):  # a target that takes no step, or is gone: nobody drafts for it
                    dismiss(self._endpoint, SWITCH_S)
        _end(old)
        return handshake

    def _start(self, config: EngineConfig, is_wanted: Callable[[], bool]) -> tuple["_Drafter", DrafterHandshake]:
        """A new drafter, which is about to knock. RayError, OSError or _AbandonedError; then there is none."""
        drafter, self._first = self._first or self._create(config), None
        try:
            handshake = drafter.load(self._num_slots, is_wanted)
        except BaseException:
            drafter.end()
            raise
        self._given_up.clear()  # what was said so far was said of another one
        drafter.draft(self._endpoint)
        return drafter, handshake

    def _create(self, config: EngineConfig) -> "_Drafter":
        self._num_created += 1
        path = Path(self._endpoint.address).with_name(f"pulse-drafter-{self._num_created}")
        return _Drafter(Heartbeat(path), self._actor_class.remote(config, str(path)))


class _AbandonedError(Exception):
    """Nobody waits any more for what was being loaded."""


class _Drafter:
    """One life of a drafter, from its actor's creation to its end."""

    def __init__(self, heartbeat: Heartbeat, actor: Any) -> None:
        self._heartbeat = heartbeat
        self._actor = actor
        self._process: Process | None = None
        self._sentinel: ray.ObjectRef[None] | None = None
        self._born = time.monotonic()

    @property
    def age(self) -> float:
        return time.monotonic() - self._born

    def load(self, num_slots: int, is_wanted: Callable[[], bool]) -> DrafterHandshake:
        """RayError if it fails, TimeoutError if it stands still, _AbandonedError soon after it is wanted no more."""
        promise: ray.ObjectRef[DrafterHandshake] = self._actor.start.remote(num_slots)
        while not ray.wait([promise], timeout=WATCH_S)[0]:
            self._hold()
            if not is_wanted():
                raise _AbandonedError
            self._check_progress()
        handshake: DrafterHandshake = ray.get(promise)
        self._hold()
        return handshake

    def _hold(self) -> None:
        """Get hold of its process, which lives, while its number is its own."""
        if self._process is None and self._heartbeat.pid is not None:
            self._process = Process(self._heartbeat.pid)

    def _check_progress(self) -> None:
        if (silence := self._heartbeat.silence()) > FROZEN_S:
            raise TimeoutError(f"it has not run for {silence:.0f} s")
        if self._heartbeat.pid is None and self.age > UNBORN_S:
            raise TimeoutError(f"its process has not come up in {self.age:.0f} s")

    def draft(self, endpoint: DraftEndpoint) -> None:
        self._sentinel = self._actor.loop.remote(*endpoint)

    def has_ended(self) -> bool:
        assert self._sentinel is not None
        return bool(ray.wait([self._sentinel], timeout=0)[0])

    def await_end(self, timeout: float) -> None:
        """Wait for the target to dismiss it, but not for ever."""
        assert self._sentinel is not None
        ray.wait([self._sentinel], timeout=timeout)

    def exit_reason(self) -> str:
        assert self._sentinel is not None
        return exit_reason("the drafter", self._sentinel, "was dismissed by its target")

    def end(self) -> None:
        with contextlib.suppress(RayActorError):
            ray.kill(self._actor)
        if self._process is not None:
            self._process.kill()


def _end(drafter: _Drafter | None) -> None:
    if drafter is not None:
        drafter.end()
