"""Watchdogs report frozen ranks and kill ranks whose router is gone."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.liveness import watchdog
from cluster.liveness.actors import Place
from cluster.liveness.watchdog import NodeWatchdog, RemoteWatchdog, WatchdogActor, ranks_by_node, watch_router
from specray.heartbeat import HeartbeatFile
from tests.support.processes import TIMEOUT_S, wait_until

Child = subprocess.Popen[bytes]


@pytest.fixture
def child() -> Iterator[Child]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of watchdog actors, which exit soon when they are not polled."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(watchdog, "ORPHAN_TIMEOUT_S", 1.5)
    monkeypatch.setattr("os._exit", codes.append)
    return codes


def test_ranks_are_grouped_by_node_in_order() -> None:
    places = [Place(node, "192.0.2.1", pid) for pid, node in enumerate(["b", "a", "b", "c"])]
    assert list(ranks_by_node(places).items()) == [("b", [0, 2]), ("a", [1]), ("c", [3])]


def test_the_watchdog_names_the_rank_that_stopped_beating(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FROZEN_S", 0.2)
    monkeypatch.setattr(watchdog, "SECOND_LOOK_S", 0.1)
    watch = NodeWatchdog(tmp_path, {2: child.pid, 3: child.pid})
    assert watch.failure() is None  # neither has beaten yet
    silent, beating = (HeartbeatFile(Path(watch.heartbeat_paths[rank])) for rank in (2, 3))
    silent.mark_loaded()
    time.sleep(0.3)
    beating.mark_loaded()
    assert watch.failure() is None  # the second look decides
    time.sleep(0.1)
    beating.mark_loaded()
    assert str(watch.failure()).startswith("rank 2 of the target has not run for ")


def test_a_loading_rank_has_a_longer_deadline(tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "FROZEN_S", 0.0)
    monkeypatch.setattr(watchdog, "SECOND_LOOK_S", 0.0)
    watch = NodeWatchdog(tmp_path, {0: child.pid})
    HeartbeatFile(Path(watch.heartbeat_paths[0])).beat()
    time.sleep(0.01)
    assert watch.failure() is None
    monkeypatch.setattr(watchdog, "LOADING_FROZEN_S", 0.0)
    assert str(watch.failure()).startswith("rank 0 of the target has not run for ")


def test_a_frozen_router_is_killed_and_a_running_one_is_not(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(watchdog, "ROUTER_FROZEN_S", 0.5)
    heartbeat = HeartbeatFile(tmp_path / "heartbeat-router")
    monkeypatch.setattr("os.getpid", lambda: child.pid)
    heartbeat.beat()
    watch_router(HeartbeatFile(tmp_path / "heartbeat-router"))
    for _ in range(10):
        heartbeat.beat()
        time.sleep(0.1)
    assert child.poll() is None
    child.send_signal(signal.SIGSTOP)
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_watchdog_that_is_no_longer_polled_kills_its_ranks(child: Child, exit_codes: list[int]) -> None:
    actor = WatchdogActor({1: child.pid})
    folder = Path(actor.heartbeat_paths()[1]).parent
    child.send_signal(signal.SIGSTOP)  # a frozen rank is killed, too
    for _ in range(15):
        assert actor.failure() is None
        time.sleep(0.1)
    assert (child.poll(), exit_codes) == (None, [])
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    wait_until(lambda: exit_codes)
    assert exit_codes == [1]
    assert not folder.exists()


def test_ranks_that_stalled_with_the_whole_machine_are_not_given_up(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FROZEN_S", 0.2)
    watch = NodeWatchdog(tmp_path, {0: child.pid})
    rank = HeartbeatFile(Path(watch.heartbeat_paths[0]))
    for _ in range(3):
        rank.mark_loaded()
        time.sleep(0.6)  # neither this process nor the rank runs
        assert watch.failure() is None


def fail(*_: object) -> None:
    raise KeyError("a bug")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_router_that_cannot_be_watched_is_killed(
    tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "wait_until_silent", fail)
    monkeypatch.setattr("os.getpid", lambda: child.pid)
    heartbeat = HeartbeatFile(tmp_path / "heartbeat-router")
    heartbeat.beat()
    watch_router(heartbeat)
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watchdog_that_cannot_watch_its_router_exits(
    child: Child, exit_codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "wait_until_silent", fail)
    WatchdogActor({1: child.pid})
    wait_until(lambda: exit_codes)
    assert exit_codes == [1]


def test_a_watchdog_that_cannot_be_polled_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "_start", lambda *_: SimpleNamespace(heartbeat_paths=SimpleNamespace(remote=dict)))
    monkeypatch.setattr(watchdog.ray, "get", lambda paths: paths)
    remote = RemoteWatchdog({0: 1}, "192.0.2.1", {})
    wait_until(remote.failure)
    assert remote.failure() == "the watchdog on the node 192.0.2.1 cannot be polled: AttributeError"


def test_a_watchdog_waits_longer_than_the_router() -> None:
    """Otherwise it would kill ranks that the router still uses."""
    assert watchdog.POLL_INTERVAL_S + watchdog.ANSWER_TIMEOUT_S < watchdog.ORPHAN_TIMEOUT_S
