"""Supervision of a drafter: start, restart and replacement, with fake actors controlled by the test."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from cluster.engine import supervisor as supervision
from cluster.engine.executor import RayExecutor
from cluster.engine.supervisor import DrafterSupervisor
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError, EngineDeadError
from specray.heartbeat import HeartbeatFile
from specray.worker.remote_drafter.handshake import NO_DRAFTER, DraftEndpoint, DrafterHandshake
from tests.support.processes import wait_until

HANDSHAKE = DrafterHandshake(7, [0], True)
NGRAM = SpeculativeConfig(algorithm="NGRAM")
SMALL = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=3)
OFF = SpeculativeConfig()
HEAD = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="head")


class Call(Future[Any]):
    """A method of an actor, and the reference that calling it returns. The test sets its result."""

    def remote(self, *arguments: object) -> "Call":
        self.arguments = arguments
        return self


class FakeActor:
    """A DraftActor."""

    def __init__(self, config: EngineConfig, heartbeat_path: str, rank: int) -> None:
        self.speculative, self.rank = config.speculative, rank
        self.heartbeat = HeartbeatFile(Path(heartbeat_path))
        self.start, self.loop = Call(), Call()
        self.is_killed = False


class FakeRay:
    """The part of Ray that the supervisor uses."""

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.loads_at_once = True
        self.accepts_at_once = True  # as a target does between two steps

    def remote(self, _: type) -> "FakeRay":
        return self

    def options(self, **_: object) -> Any:
        outer = self

        class Class:
            @staticmethod
            def remote(config: EngineConfig, heartbeat_path: str, rank: int) -> FakeActor:
                outer.actors.append(FakeActor(config, heartbeat_path, rank))
                if outer.accepts_at_once and rank == 0:
                    outer.actors[-1].heartbeat.mark_loaded()
                if outer.loads_at_once:
                    outer.actors[-1].start.set_result(HANDSHAKE)
                return outer.actors[-1]

        return Class

    def wait(self, calls: list[Call], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        done = wait(calls, timeout).done
        return list(done), [call for call in calls if call not in done]

    def get(self, call: Call) -> Any:
        return call.result()

    def kill(self, actor: FakeActor) -> None:
        actor.is_killed = True


class FakeProcess:
    def __init__(self, pid: int) -> None:
        self.pid, self.is_running = pid, True

    def kill(self, grace_s: float) -> None:  # noqa: ARG002
        self.is_running = False


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(supervision, "ray", fake)
    monkeypatch.setattr(supervision, "Process", FakeProcess)
    monkeypatch.setattr(supervision, "exit_reason", lambda *_: "drafter died")
    monkeypatch.setattr(supervision, "MIN_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervision, "POLL_INTERVAL_S", 0.01)
    return fake


@pytest.fixture
def supervisor(ray: FakeRay, tmp_path: Path) -> Iterator[DrafterSupervisor]:  # noqa: ARG001  # patched first
    supervisor = DrafterSupervisor(EngineConfig(model="toy"), DraftEndpoint(f"{tmp_path}/nowhere", 1), [{}])
    assert supervisor.start(64) == NO_DRAFTER
    yield supervisor
    supervisor.close()


def test_the_first_process_starts_before_the_target_has_loaded(ray: FakeRay, tmp_path: Path) -> None:
    config = EngineConfig(model="toy", speculative=NGRAM)
    supervisor = DrafterSupervisor(config, DraftEndpoint(f"{tmp_path}/nowhere", 1), [{}])
    assert [actor.speculative for actor in ray.actors] == [NGRAM]
    assert supervisor.start(64) == HANDSHAKE
    assert len(ray.actors) == 1
    supervisor.close()
    assert ray.actors[0].is_killed

    DrafterSupervisor(config, DraftEndpoint(f"{tmp_path}/nowhere", 1), [{}]).close()  # the target did not load
    assert ray.actors[1].is_killed


def test_a_process_is_released_while_it_runs_and_once(ray: FakeRay, tmp_path: Path) -> None:
    """A daemon that shares the GPU hears of the end of a process before Ray does; see `cluster.engine.mps`."""
    released: list[tuple[int, bool]] = []
    supervisor = DrafterSupervisor(
        EngineConfig(model="toy", speculative=HEAD),
        DraftEndpoint(f"{tmp_path}/nowhere", 1),
        [{}, {}],
        before_kill=lambda pid: released.append((pid, any(actor.is_killed for actor in ray.actors))),
    )
    for actor in ray.actors:
        actor.heartbeat.beat()
    supervisor.start(64)
    supervisor.close()
    supervisor.close()
    assert released == [(os.getpid(), False)] * 2
    assert all(actor.is_killed for actor in ray.actors)


def test_a_new_drafter_takes_over_before_the_old_one_ends(ray: FakeRay, supervisor: DrafterSupervisor) -> None:
    assert supervisor.replace(NGRAM) == HANDSHAKE
    ray.loads_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL)
        wait_until(lambda: len(ray.actors) == 2)
        old, new = ray.actors
        assert supervisor.state == ("ready", NGRAM, SMALL, 0, "")
        new.start.set_result(HANDSHAKE)
        time.sleep(0.1)
        assert not old.is_killed
        assert not replaced.done()
        old.loop.set_result(None)  # the target has dropped it
        assert replaced.result(10) == HANDSHAKE
    assert old.is_killed
    assert not new.is_killed
    assert supervisor.state == ("ready", SMALL, None, 0, "")


@pytest.mark.parametrize("before", [NGRAM, OFF], ids=["replaced", "added"])
def test_a_drafter_counts_as_replaced_once_the_target_has_accepted_it(
    ray: FakeRay, supervisor: DrafterSupervisor, before: SpeculativeConfig
) -> None:
    supervisor.replace(before)
    num_before = len(ray.actors)
    ray.accepts_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL)
        wait_until(lambda: len(ray.actors) > num_before)
        for actor in ray.actors[:num_before]:
            actor.loop.set_result(
                None
            )  # the target drops the old one when it accepts the new one, which learns it later
        supervisor.report_fault()
        time.sleep(0.1)
        assert not replaced.done()
        assert supervisor.state.loading == SMALL
        ray.actors[-1].heartbeat.mark_loaded()
        assert replaced.result(10) == HANDSHAKE
    assert supervisor.state == ("ready", SMALL, None, 0, "")
    time.sleep(0.1)
    assert len(ray.actors) == num_before + 1  # the fault was one of the old drafter


def test_a_drafter_that_the_target_refuses_leaves_the_old_one_running(
    ray: FakeRay, supervisor: DrafterSupervisor
) -> None:
    supervisor.replace(NGRAM)
    ray.accepts_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL)
        wait_until(lambda: len(ray.actors) == 2)
        ray.actors[1].loop.set_result(None)
        with pytest.raises(EngineDeadError, match="the drafter died"):
            replaced.result(10)
    assert [actor.is_killed for actor in ray.actors] == [False, True]
    assert supervisor.state == ("ready", NGRAM, None, 0, "")


@pytest.mark.parametrize(
    ("failure", "error", "part"),
    [
        (RayTaskError("start", "…", ConfigError("another vocabulary")), ConfigError, "another vocabulary"),
        (RayTaskError("start", "…", MemoryError("no room")), EngineDeadError, "no room"),
        (RayActorError(), EngineDeadError, "it died"),
        (OutOfMemoryError("…"), EngineDeadError, "no memory left"),
    ],
)
def test_a_drafter_that_does_not_load_leaves_the_old_one_running(
    ray: FakeRay, supervisor: DrafterSupervisor, failure: Exception, error: type[Exception], part: str
) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL)
        wait_until(lambda: len(ray.actors) == 2)
        ray.actors[1].start.set_exception(failure)
        with pytest.raises(error, match=part):
            replaced.result(10)
    assert [actor.is_killed for actor in ray.actors] == [False, True]
    assert supervisor.state == ("ready", NGRAM, None, 0, "")


def test_replacing_by_no_algorithm_ends_the_drafter_without_a_restart(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_before: list[bool] = []
    monkeypatch.setattr(supervision, "dismiss", lambda *_: killed_before.append(ray.actors[0].is_killed))
    supervisor.replace(NGRAM)
    assert supervisor.replace(OFF) == NO_DRAFTER
    assert killed_before == [False]
    assert ray.actors[0].is_killed
    assert supervisor.state == ("off", OFF, None, 0, "")
    supervisor.report_fault()
    time.sleep(0.1)
    assert len(ray.actors) == 1
    supervisor.replace(SMALL)
    assert supervisor.state.state == "ready"


@pytest.mark.parametrize("has_faulted", [True, False], ids=["faulted", "died"])
def test_a_lost_drafter_is_restarted(ray: FakeRay, supervisor: DrafterSupervisor, has_faulted: bool) -> None:
    supervisor.replace(NGRAM)
    supervisor.report_fault() if has_faulted else ray.actors[0].loop.set_exception(RayActorError())
    wait_until(lambda: supervisor.state.num_restarts == 1)
    assert [actor.speculative for actor in ray.actors] == [NGRAM, NGRAM]
    assert ray.actors[0].is_killed


def test_a_late_fault_of_a_lost_drafter_does_not_end_the_next_one(ray: FakeRay, supervisor: DrafterSupervisor) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    supervisor.report_fault()
    wait_until(lambda: len(ray.actors) == 2)
    supervisor.report_fault()
    ray.actors[1].start.set_result(HANDSHAKE)
    wait_until(lambda: supervisor.state.num_restarts == 1)
    time.sleep(0.1)
    assert len(ray.actors) == 2


def test_a_fault_that_is_noticed_before_the_next_drafter_is_accepted_does_not_end_it(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.replace(NGRAM)
    ray.actors[0].loop.set_exception(RayActorError())
    wait_until(lambda: supervisor.state.num_restarts == 1)
    monkeypatch.setattr(HeartbeatFile, "has_loaded", False)
    supervisor.report_fault()  # an idle target has noticed only now that the first one is gone
    time.sleep(0.1)
    monkeypatch.setattr(HeartbeatFile, "has_loaded", True)
    time.sleep(0.1)
    assert len(ray.actors) == 2
    supervisor.report_fault()
    wait_until(lambda: len(ray.actors) == 3)


def test_a_replacement_cancels_a_restart(ray: FakeRay, supervisor: DrafterSupervisor) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    supervisor.report_fault()
    wait_until(lambda: len(ray.actors) == 2)
    assert supervisor.state.state == "loading"
    ray.loads_at_once = True
    supervisor.replace(SMALL)
    assert [actor.is_killed for actor in ray.actors] == [True, True, False]
    assert supervisor.state == ("ready", SMALL, None, 0, "")


@pytest.mark.parametrize("what", ["restart", "replacement"])
def test_closing_does_not_wait_for_a_loading_drafter(ray: FakeRay, supervisor: DrafterSupervisor, what: str) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL) if what == "replacement" else None
        if replaced is None:
            supervisor.report_fault()
        wait_until(lambda: len(ray.actors) == 2)
        start = time.monotonic()
        supervisor.close()
        assert time.monotonic() - start < 5.0  # the drafter never finishes loading
        if replaced is not None:
            with pytest.raises(EngineDeadError):
                replaced.result(10)
    assert [actor.is_killed for actor in ray.actors] == [True, True]
    with pytest.raises(EngineDeadError):
        supervisor.replace(SMALL)


def test_a_drafter_that_freezes_while_loading_is_replaced(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LOADING_FROZEN_S", 1.0)
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    supervisor.report_fault()
    wait_until(lambda: len(ray.actors) == 2)
    _, frozen = ray.actors
    for _ in range(15):
        frozen.heartbeat.beat()
        time.sleep(0.1)
    assert not frozen.is_killed  # slow, but running
    wait_until(lambda: len(ray.actors) == 3)
    assert frozen.is_killed
    ray.actors[2].start.set_result(HANDSHAKE)
    wait_until(lambda: supervisor.state == ("ready", NGRAM, None, 1, ""))


def test_a_part_of_a_drafter_that_freezes_while_loading_is_noticed(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on another node has no heartbeat here, and does not count as frozen."""
    monkeypatch.setattr(supervision, "LOADING_FROZEN_S", 0.2)
    ray.loads_at_once = False
    config = EngineConfig(model="toy", tp_size=3, speculative=HEAD)
    supervisor = DrafterSupervisor(config, DraftEndpoint(f"{tmp_path}/nowhere", 1), [{}, {}, {}])
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(supervisor.start, 64)
        first, frozen, far = ray.actors
        frozen.heartbeat.beat()
        while not started.done():
            first.heartbeat.beat()
            time.sleep(0.02)
        with pytest.raises(EngineDeadError, match="the drafter did not start"):
            started.result()
    assert all(actor.is_killed for actor in (first, frozen, far))
    supervisor.close()


def test_an_error_in_the_supervision_ends_the_engine_with_its_reason(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise KeyError("a bug")

    monkeypatch.setattr(supervision, "exit_reason", fail)
    supervisor.replace(NGRAM)
    ray.actors[0].loop.set_result(None)
    wait_until(lambda: supervisor.failure is not None)
    executor = object.__new__(RayExecutor)
    executor._sentinels, executor._watchdogs, executor._failure, executor._drafter = [], None, None, supervisor
    assert executor.failure() == "the supervision of the drafter failed: KeyError: 'a bug'"
    wait_until(lambda: ray.actors[0].is_killed)
    with pytest.raises(EngineDeadError, match="a bug"):
        supervisor.replace(SMALL)


def test_a_drafter_that_the_target_has_not_accepted_is_absent(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.accepts_at_once = False
    monkeypatch.setattr(supervision, "exit_reason", lambda *_: "drafter failed: EngineDeadError: the target refused it")
    config = EngineConfig(model="toy", speculative=NGRAM)
    supervisor = DrafterSupervisor(config, DraftEndpoint(f"{tmp_path}/nowhere", 1), [{}])
    supervisor.start(64)  # which returns before the target runs steps
    assert supervisor.state == ("loading", NGRAM, None, 0, "the drafter is being started")
    ray.actors[0].loop.set_result(None)
    wait_until(lambda: supervisor.state.num_restarts == 1)
    assert supervisor.state.absence == "the last drafter failed: EngineDeadError: the target refused it"
    supervisor.close()


def test_a_drafter_whose_process_does_not_start_is_an_error(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_HEARTBEAT_TIMEOUT_S", 0.2)
    ray.loads_at_once = False
    with pytest.raises(EngineDeadError, match="did not start"):
        supervisor.replace(NGRAM)
    assert ray.actors[0].is_killed


def test_the_drafters_of_all_ranks_are_one(ray: FakeRay, tmp_path: Path) -> None:
    """They meet at a new file, and the end of one ends and restarts all; a drafter without a model is one process."""
    config = EngineConfig(model="toy", tp_size=2, speculative=SpeculativeConfig(algorithm="EAGLE3"))
    supervisor = DrafterSupervisor(config, DraftEndpoint(f"{tmp_path}/nowhere", 1), [{}, {}])
    assert supervisor.start(64) == HANDSHAKE
    first, second = ray.actors
    assert first.start.arguments == second.start.arguments == (64, f"file://{tmp_path}/ranks-drafter-1", 2)
    second.loop.set_exception(RayActorError())
    wait_until(lambda: supervisor.state == ("ready", config.speculative, None, 1, ""))
    assert len(ray.actors) == 4
    assert first.is_killed
    assert second.is_killed
    assert ray.actors[3].start.arguments == (64, f"file://{tmp_path}/ranks-drafter-2", 2)
    supervisor.replace(NGRAM)
    assert len(ray.actors) == 5
    assert ray.actors[4].start.arguments == (64, None, 1)
    supervisor.close()
    assert all(actor.is_killed for actor in ray.actors)
