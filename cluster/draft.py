"""The drafter's process, and the life of it: started beside its target rank, watched, ended and started again.

Not here: what it says to the target (`specray.worker.draft_worker`), and who gives it up (`specray.worker.colocated`).
"""

import contextlib
import logging
import os
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cluster.actors import last_words, start_error
from cluster.processes import Process
from specray.config import EngineConfig

FIRST_PAUSE_S = 0.5  # before a new start; twice as long after every start that did not last
LONGEST_PAUSE_S = 15.0
LASTING_S = 60.0  # a drafter that lived so long died of something new
WATCH_S = 0.25

logger = logging.getLogger("ray.serve")


class DraftActor:
    """A Ray actor. `start` once, then `loop`: its end is the end of the drafter."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def start(self, num_slots: int) -> tuple[int, bool]:
        """Load the drafter for a target with so many KV slots; (most draft tokens, whether it reads the next token)."""
        # Here, not above: the router imports this module, and torch must stay out of its process.
        import torch

        from specray.worker.draft_worker import DraftWorker

        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        self._worker = DraftWorker(self._config, num_slots)
        return self._worker.hello.max_draft_tokens, self._worker.hello.reads_next_token

    def pid(self) -> int:
        return os.getpid()

    def loop(self, address: str, epoch: int) -> None:
        """Draft for the target behind the socket at `address` until one of the two is gone."""
        self._worker.serve(address, epoch)


class DraftKeeper:
    """Keeps one drafter alive; `options` are Ray's for the actor. A thread of its own waits and starts."""

    def __init__(self, config: EngineConfig, num_slots: int, address: str, epoch: int, options: dict[str, Any]) -> None:
        self._config = config
        self._num_slots = num_slots
        self._doorbell = (address, epoch)
        self._actor_class = ray.remote(DraftActor).options(**options)
        self._actor: Any = None
        self._process: Process | None = None
        self._sentinel: ray.ObjectRef[None] | None = None
        self._given_up = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="specray-draft-keeper", daemon=True)

    def start(self) -> tuple[int, bool]:
        """Start the first drafter; what `DraftActor.start` says. ConfigError if it does not fit the target."""
        try:
            traits = self._start()
        except RayTaskError as error:
            raise start_error("the drafter", error) from error
        self._thread.start()
        return traits

    def give_up(self) -> None:
        """The target has dismissed the drafter; a new one is started. Any thread may say so."""
        self._given_up.set()

    def close(self) -> None:
        self._closing.set()
        self._given_up.set()  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()
        self._end()

    def _start(self) -> tuple[int, bool]:
        self._actor = self._actor_class.remote(self._config)
        self._process = Process(ray.get(self._actor.pid.remote()))
        max_draft_tokens, reads_next_token = ray.get(self._actor.start.remote(self._num_slots))
        self._sentinel = self._actor.loop.remote(*self._doorbell)
        return max_draft_tokens, reads_next_token

    def _end(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._actor)
        if self._process is not None:
            self._process.kill()
        self._actor = self._sentinel = self._process = None

    def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing.is_set():
            born = time.monotonic()
            reason = self._await_end()
            if self._closing.is_set():
                return
            logger.warning("the drafter %s after %.1f s; a new one is started", reason, time.monotonic() - born)
            self._end()
            pause = FIRST_PAUSE_S if time.monotonic() - born > LASTING_S else min(2 * pause, LONGEST_PAUSE_S)
            if self._closing.wait(pause):
                return
            self._restart()

    def _restart(self) -> None:
        try:
            self._given_up.clear()
            self._start()
            logger.warning("a new drafter is ready")
        except RayError as error:
            logger.error("the drafter did not start: %s", error)

    def _await_end(self) -> str:
        """Why the drafter has ended, once it has; at once if it did not start."""
        while self._sentinel is not None:
            if self._given_up.wait(WATCH_S):
                return "was given up by its target"
            ended, _ = ray.wait([self._sentinel], timeout=0)
            if ended:
                return last_words("the drafter", self._sentinel, "was dismissed by its target")
        return "did not start"
