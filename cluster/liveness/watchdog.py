"""Watching an engine's processes on one node: whether they run, and their certain end.

A rank's node is the only place where its pulse can be read and where it can be ended though it is frozen. On the
router's node the router has the guard itself; on every other node it is an actor, which the router asks twice a
second. Silence works both ways: the router gives up a guard that does not answer, and a guard whom nobody asks ends
its ranks, for their router is gone or cut off. The router itself, which can freeze like them, is watched by rank 0.
Not here: what follows for the engine (`executor`).
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

from cluster.liveness.actors import Place
from cluster.liveness.heartbeat import Heartbeat, Process

FROZEN_S = 3.0  # a rank that has not run for so long is given up, and its group with it
LOADING_FROZEN_S = 60.0  # one that loads may hold its interpreter for seconds
ASK_S = 0.5  # between two questions to a guard on another node
SILENT_S = 3.0  # a node whose guard has not answered for so long is given up
ORPHANED_S = 5.0  # a guard whom nobody asked for so long ends its ranks: after the router would have given it up
ROUTER_FROZEN_S = 8.0  # a router that has not run for so long is ended: ingresses gave it up long before
FAREWELL_S = 1.0  # how long guards that can be reached are given to end their ranks

logger = logging.getLogger("ray.serve")


class Watchdogs:
    """One guard for each node with ranks; `options_of` has Ray's options of an actor beside a rank."""

    def __init__(self, folder: Path, places: Sequence[Place], options_of: Callable[[int], dict[str, Any]]) -> None:
        by_node = ranks_by_node(places)
        here = by_node.pop(Place.here().node_id, [])
        self._local = NodeWatchdog(folder, {rank: places[rank].pid for rank in here})
        self._remote = [
            RemoteWatchdog({rank: places[rank].pid for rank in ranks}, places[ranks[0]].address, options_of(ranks[0]))
            for ranks in by_node.values()
        ]
        self.heartbeat_paths = dict(self._local.heartbeat_paths)  # by rank, each on the rank's own node
        for watchdog in self._remote:
            self.heartbeat_paths |= watchdog.heartbeat_paths

    def failure(self) -> str | None:
        """Why a rank has to be given up, or None while all run. Returns at once."""
        failures = [self._local.failure(), *(watchdog.failure() for watchdog in self._remote)]
        return next((failure for failure in failures if failure is not None), None)

    def end(self) -> None:
        """End every rank, those on nodes that cannot be reached excepted. May be called twice."""
        promises = [watchdog.end() for watchdog in self._remote]  # first: they take their time
        self._local.end()
        if promises:
            ray.wait(promises, num_returns=len(promises), timeout=FAREWELL_S)
        for watchdog in self._remote:
            watchdog.leave()
        self._remote = []


def ranks_by_node(places: Sequence[Place]) -> dict[str, list[int]]:
    """Ranks of each node by its id, both in order of the ranks."""
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node_id, []).append(rank)
    return nodes


class NodeWatchdog:
    """The ranks on this node, by number and process id."""

    def __init__(self, folder: Path, pids: Mapping[int, int]) -> None:
        self.heartbeat_paths = {rank: str(folder / f"pulse-{rank}") for rank in pids}
        self._heartbeats = {rank: Heartbeat(Path(path)) for rank, path in self.heartbeat_paths.items()}
        self._processes = [Process(pid) for pid in pids.values()]

    def failure(self) -> str | None:
        """Which rank is frozen, or None while all run."""
        for rank, heartbeat in self._heartbeats.items():
            if (silence := heartbeat.silence()) > (FROZEN_S if heartbeat.is_at_work else LOADING_FROZEN_S):
                return f"rank {rank} of the target has not run for {silence:.1f} s"
        return None

    def end(self) -> None:
        """End every rank, frozen or not. May be called twice."""
        for process in self._processes:
            process.kill()


def watch_router(heartbeat: Heartbeat) -> None:
    """End a router on this node once it is frozen: Serve asks such a one for minutes whether it may be replaced."""
    assert heartbeat.pid is not None, "the router's heart beats before it starts its ranks"
    watch = threading.Thread(
        target=_await_standstill, args=(Process(heartbeat.pid), heartbeat), name="specray-watch", daemon=True
    )
    watch.start()


def _await_standstill(router: Process, heartbeat: Heartbeat) -> None:
    while heartbeat.silence() < ROUTER_FROZEN_S:
        time.sleep(ASK_S)
    logger.error(
        "the router has not run for %g s: its process is ended, and another one takes its place", ROUTER_FROZEN_S
    )
    router.kill()


class WatchdogActor:
    """A guard on a node that the router is not on. Whoever does not ask it for ORPHANED_S loses the ranks."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="specray-")  # mode 0700
        self._watchdog = NodeWatchdog(Path(self._folder.name), pids)
        self._asked_at = time.monotonic()
        threading.Thread(target=self._await_silence, name="specray-guard", daemon=True).start()

    def heartbeat_paths(self) -> dict[int, str]:
        return self._watchdog.heartbeat_paths

    def failure(self) -> str | None:
        self._asked_at = time.monotonic()
        return self._watchdog.failure()

    def end(self) -> None:
        self._watchdog.end()
        self._folder.cleanup()

    def _await_silence(self) -> None:
        while time.monotonic() - self._asked_at < ORPHANED_S:
            time.sleep(ASK_S)
        logger.error("no word from the router for %g s: the ranks on this node end", ORPHANED_S)
        self.end()
        os._exit(1)


class RemoteWatchdog:
    """The router's end of a guard on another node; `options` are Ray's for its actor. A thread of its own asks."""

    def __init__(self, pids: Mapping[int, int], address: str, options: dict[str, Any]) -> None:
        self._address = address
        self._actor = _start(pids, options)
        self.heartbeat_paths: Mapping[int, str] = ray.get(self._actor.heartbeat_paths.remote())
        self._failure: str | None = None
        self._closing = threading.Event()
        threading.Thread(target=self._ask_on, name="specray-guard", daemon=True).start()

    def failure(self) -> str | None:
        """The latest answer; that there was none is a failure, too."""
        return self._failure

    def end(self) -> "ray.ObjectRef[None]":
        """End every rank on that node, if it can be reached; the promise is kept once that is done."""
        self._closing.set()
        promise: ray.ObjectRef[None] = self._actor.end.remote()
        return promise

    def leave(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def _ask_on(self) -> None:
        while self._failure is None and not self._closing.wait(ASK_S):
            self._failure = self._ask()

    def _ask(self) -> str | None:
        answer: ray.ObjectRef[str | None] = self._actor.failure.remote()
        answered, _ = ray.wait([answer], timeout=SILENT_S)
        if not answered:
            return f"the node {self._address} has not answered for {SILENT_S:g} s"
        try:
            return ray.get(answer)
        except RayError as error:
            return f"the guard on the node {self._address} is gone: {type(error).__name__}"


def _start(pids: Mapping[int, int], options: dict[str, Any]) -> Any:
    return ray.remote(WatchdogActor).options(**options).remote(dict(pids))
