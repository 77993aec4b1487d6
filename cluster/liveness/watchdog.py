"""Watches the processes of an engine, and kills them when the engine is given up.

The heartbeat file of a rank can be read only on the rank's node, and only there can a frozen rank be killed. The router
watches the ranks on its own node itself. On each other node it starts a `WatchdogActor` and polls it. Both sides have a
deadline: the router gives up a node whose watchdog does not answer, and a watchdog that is no longer polled kills its
ranks, because their router is dead or unreachable. The router may freeze as well, so rank 0 watches it.

`cluster.engine.executor` reacts to failures.
"""

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.liveness.actors import Place, Process
from specray.heartbeat import HEARTBEAT_INTERVAL_S, NUM_PARTS, HeartbeatFile, LocalHeartbeat, wait_until_silent
from specray.private_folders import PREFIX, own, remove_leftovers

FROZEN_S = 3.0  # deadline of a rank's heartbeat
LOADING_FROZEN_S = 60.0  # the same while it loads, when it may hold the interpreter lock for seconds
SECOND_LOOK_S = 0.5  # after which a rank that seems frozen has beaten, if only this process or machine had stalled
POLL_INTERVAL_S = 0.5
ANSWER_TIMEOUT_S = 3.0  # after which a polled watchdog counts as unreachable
ORPHAN_TIMEOUT_S = 5.0  # without a poll; longer than the router takes to give up the node
ROUTER_FROZEN_S = 8.0  # deadline of the router's heartbeat; ingresses stop using a frozen router after 3 s
KILL_TIMEOUT_S = 1.0  # for watchdogs on other nodes to kill their ranks

logger = logging.getLogger("ray.serve")


class Watchdogs:
    """One watchdog per node that has ranks. `options_of` returns the options of an actor in a rank's bundle."""

    def __init__(self, folder: Path, places: Sequence[Place], options_of: Callable[[int], dict[str, Any]]) -> None:
        by_node = ranks_by_node(places)
        local_ranks = by_node.pop(Place.here().node_id, [])
        self._local = NodeWatchdog(folder, {rank: places[rank].pid for rank in local_ranks})
        self._remote = [
            RemoteWatchdog({rank: places[rank].pid for rank in ranks}, places[ranks[0]].address, options_of(ranks[0]))
            for ranks in by_node.values()
        ]
        self.heartbeat_paths = dict(self._local.heartbeat_paths)  # by rank, each on the rank's own node
        for watchdog in self._remote:
            self.heartbeat_paths |= watchdog.heartbeat_paths

    def failure(self) -> str | None:
        """Why the engine must be given up; None while all ranks run. Does not block."""
        failures = [self._local.failure(), *(watchdog.failure() for watchdog in self._remote)]
        return next((failure for failure in failures if failure is not None), None)

    def kill_ranks(self, grace_s: float = 0.0) -> None:
        """Kill every rank on a reachable node, unless it ends within `grace_s` seconds. Idempotent."""
        calls = [watchdog.kill_ranks(grace_s) for watchdog in self._remote]  # these take longest
        self._local.kill_ranks(grace_s)
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=KILL_TIMEOUT_S + grace_s)
        for watchdog in self._remote:
            watchdog.stop()
        self._remote = []


def ranks_by_node(places: Sequence[Place]) -> dict[str, list[int]]:
    """The ranks of each node, by node ID and in ascending order."""
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node_id, []).append(rank)
    return nodes


class NodeWatchdog:
    """Watches ranks on this node. `pids` has the process ID of each rank."""

    def __init__(self, folder: Path, pids: Mapping[int, int]) -> None:
        self.heartbeat_paths = {rank: str(folder / f"heartbeat-{rank}") for rank in pids}
        self._heartbeats = {rank: HeartbeatFile(Path(path)) for rank, path in self.heartbeat_paths.items()}
        self._processes = [Process(pid) for pid in pids.values()]
        self._looks: dict[int, tuple[float, float]] = {}  # of overdue ranks: time of the first look, of the last beat

    def failure(self) -> str | None:
        """Which rank is frozen; None while all run. One that is overdue gets a second look: see SECOND_LOOK_S."""
        for rank, heartbeat in self._heartbeats.items():
            now, silence_s = time.monotonic(), heartbeat.silence_s
            if silence_s <= (FROZEN_S if heartbeat.has_loaded else LOADING_FROZEN_S):
                continue
            looked_at, beat_at = self._looks.get(rank, (now, now - silence_s))
            if now - silence_s > beat_at + HEARTBEAT_INTERVAL_S / 2:  # it has beaten since
                looked_at, beat_at = now, now - silence_s
            self._looks[rank] = looked_at, beat_at
            if now - looked_at >= SECOND_LOOK_S:
                return f"rank {rank} of the target has not run for {silence_s:.1f} s"
        return None

    def kill_ranks(self, grace_s: float = 0.0) -> None:
        """Kill every rank that does not end within `grace_s` seconds. Idempotent."""
        for process in self._processes:
            process.kill(grace_s)


def watch_router(heartbeat: HeartbeatFile) -> None:
    """Start a thread that kills the router on this node once it is frozen. Serve would take minutes to replace it."""
    assert heartbeat.pid is not None, "the router beats before it starts its ranks"
    router = Process(heartbeat.pid)
    threading.Thread(target=_watch_router, args=(router, heartbeat), name="specray-router-watch", daemon=True).start()


def _watch_router(router: Process, heartbeat: HeartbeatFile) -> None:
    try:
        wait_until_silent(heartbeat, ROUTER_FROZEN_S, POLL_INTERVAL_S)
        logger.error("the router has not run for %g s; it is killed so that Serve replaces it", ROUTER_FROZEN_S)
    finally:  # a router that is not watched must not go on
        router.kill()


class WatchdogActor:
    """Watches ranks on another node than the router's. Kills them and exits if not polled for ORPHAN_TIMEOUT_S."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        remove_leftovers(Path(tempfile.gettempdir()))  # of watchdogs that were killed
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)  # mode 0700
        own(Path(self._folder.name))
        self._watchdog = NodeWatchdog(Path(self._folder.name), pids)
        self._router = LocalHeartbeat()  # its polls
        self._router.beat()
        threading.Thread(target=self._watch_router, name="specray-watchdog", daemon=True).start()

    def heartbeat_paths(self) -> dict[int, str]:
        return self._watchdog.heartbeat_paths

    def failure(self) -> str | None:
        """Which rank is frozen; None while all run. The router's poll."""
        self._router.beat()
        return self._watchdog.failure()

    def kill_ranks(self, grace_s: float = 0.0) -> None:
        self._watchdog.kill_ranks(grace_s)
        self._folder.cleanup()

    def _watch_router(self) -> None:
        try:
            wait_until_silent(self._router, ORPHAN_TIMEOUT_S, POLL_INTERVAL_S)
            logger.error("the router has sent nothing for %g s; the ranks on this node are killed", ORPHAN_TIMEOUT_S)
            self.kill_ranks()
        finally:
            os._exit(1)  # the router notices that, and gives up the ranks


class RemoteWatchdog:
    """The router's handle to a `WatchdogActor`, which a thread polls. `options` are the actor's options."""

    def __init__(self, pids: Mapping[int, int], address: str, options: dict[str, Any]) -> None:
        self._address = address
        self._actor = _start(pids, options)
        self.heartbeat_paths: Mapping[int, str] = ray.get(self._actor.heartbeat_paths.remote())
        self._failure: str | None = None
        self._closing = threading.Event()
        threading.Thread(target=self._poll_until_failure, name="specray-watchdog", daemon=True).start()

    def failure(self) -> str | None:
        """The result of the latest poll. A missing answer is a failure, too."""
        return self._failure

    def kill_ranks(self, grace_s: float) -> "ray.ObjectRef[None]":
        """Start killing the ranks on that node. The returned reference is ready when that is done."""
        self._closing.set()
        call: ray.ObjectRef[None] = self._actor.kill_ranks.remote(grace_s)
        return call

    def stop(self) -> None:
        """Stop the actor."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def _poll_until_failure(self) -> None:
        try:
            while self._failure is None and not self._closing.wait(POLL_INTERVAL_S):
                self._failure = self._poll()
        except Exception as error:
            logger.exception("the watchdog on the node %s cannot be polled", self._address)
            self._failure = f"the watchdog on the node {self._address} cannot be polled: {type(error).__name__}"

    def _poll(self) -> str | None:
        call: ray.ObjectRef[str | None] = self._actor.failure.remote()
        for _ in range(NUM_PARTS):  # a stall of this process uses up one of them
            if ray.wait([call], timeout=ANSWER_TIMEOUT_S / NUM_PARTS)[0]:
                break
        else:
            return f"the node {self._address} has not answered for {ANSWER_TIMEOUT_S:g} s"
        try:
            return ray.get(call)
        except RayError as error:
            return f"the watchdog on the node {self._address} died: {type(error).__name__}"


def _start(pids: Mapping[int, int], options: dict[str, Any]) -> Any:
    return ray.remote(WatchdogActor).options(**options).remote(dict(pids))
