"""A guard tells who is frozen, and lets no rank outlive its router."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.liveness import watchdog
from cluster.liveness.actors import Place
from cluster.liveness.heartbeat import Heartbeat
from cluster.liveness.watchdog import NodeWatchdog, WatchdogActor, ranks_by_node, watch_router

Child = subprocess.Popen[bytes]


@pytest.fixture
def child() -> Iterator[Child]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which a guard would have left its process; guards here are soon out of patience."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog, "ASK_S", 0.05)
    monkeypatch.setattr(watchdog, "ORPHANED_S", 1.5)
    monkeypatch.setattr("os._exit", codes.append)
    return codes


def test_ranks_are_grouped_by_node_in_order() -> None:
    places = [Place(node, "192.0.2.1", pid) for pid, node in enumerate(["b", "a", "b", "c"])]
    assert list(ranks_by_node(places).items()) == [("b", [0, 2]), ("a", [1]), ("c", [3])]


def test_the_watchdog_names_the_rank_that_fell_silent(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FROZEN_S", 0.2)
    watch = NodeWatchdog(tmp_path, {2: child.pid, 3: child.pid})
    assert watch.failure() is None  # neither has begun
    silent, beating = (Heartbeat(Path(watch.heartbeat_paths[rank])) for rank in (2, 3))
    silent.begin_work()
    time.sleep(0.3)
    beating.begin_work()
    assert str(watch.failure()).startswith("rank 2 of the target has not run for 0.")


def test_a_rank_that_loads_may_be_silent_for_longer_but_not_for_ever(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FROZEN_S", 0.0)
    watch = NodeWatchdog(tmp_path, {0: child.pid})
    Heartbeat(Path(watch.heartbeat_paths[0])).beat()
    time.sleep(0.01)
    assert watch.failure() is None
    monkeypatch.setattr(watchdog, "LOADING_FROZEN_S", 0.0)
    assert str(watch.failure()).startswith("rank 0 of the target has not run for ")


def test_a_router_that_stands_still_is_ended_and_one_that_runs_is_not(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ASK_S", 0.05)
    monkeypatch.setattr(watchdog, "ROUTER_FROZEN_S", 0.5)
    heartbeat = Heartbeat(tmp_path / "pulse-router")
    monkeypatch.setattr("os.getpid", lambda: child.pid)
    heartbeat.beat()
    watch_router(Heartbeat(tmp_path / "pulse-router"))
    for _ in range(10):
        heartbeat.beat()
        time.sleep(0.1)
    assert child.poll() is None
    child.send_signal(signal.SIGSTOP)
    assert child.wait(3) == -signal.SIGKILL


def test_a_watchdog_that_is_asked_lets_its_ranks_live_and_one_that_is_not_ends_them(
    child: Child, left: list[int]
) -> None:
    actor = WatchdogActor({1: child.pid})
    folder = Path(actor.heartbeat_paths()[1]).parent
    child.send_signal(signal.SIGSTOP)  # a frozen one ends as well
    for _ in range(15):
        assert actor.failure() is None
        time.sleep(0.1)
    assert (child.poll(), left) == (None, [])
    assert child.wait(5) == -signal.SIGKILL
    for _ in range(50):
        if left:
            break
        time.sleep(0.1)
    assert left == [1]
    assert not folder.exists()


def test_a_watchdog_gives_up_later_than_the_router_does() -> None:
    """Or ranks would end that their router still counts on."""
    assert watchdog.ASK_S + watchdog.SILENT_S < watchdog.ORPHANED_S
