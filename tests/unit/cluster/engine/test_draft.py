"""A drafter's life as its keeper leads it, over actors that do what a test says."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from cluster.engine import draft
from cluster.engine.draft import DraftActor, DrafterSupervisor
from cluster.liveness.heartbeat import Heartbeat
from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError, EngineDeadError
from specray.worker.remote_drafter.handshake import NOBODY, DraftEndpoint, DrafterHandshake
from tests.support.methods import METHODS

HANDSHAKE = DrafterHandshake(7, [0], True)
NGRAM = SpeculativeConfig(algorithm="NGRAM")
SMALL = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=3)
OFF = SpeculativeConfig()


class Promise(Future[Any]):
    """What a method of an actor returns; `kept` or broken by the test."""

    def remote(self, *_: object) -> "Promise":
        return self


class FakeActor:
    """A DraftActor: `start` is its loading, `loop` its drafting."""

    def __init__(self, config: EngineConfig, heartbeat: str) -> None:
        self.speculative = config.speculative
        self.heartbeat = Heartbeat(Path(heartbeat))
        self.start, self.loop = Promise(), Promise()
        self.is_killed = False


class FakeRay:
    """Of Ray what the keeper uses."""

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.loads_at_once = True

    def remote(self, _: type) -> "FakeRay":
        return self

    def options(self, **_: object) -> Any:
        outer = self

        class Class:
            @staticmethod
            def remote(config: EngineConfig, heartbeat: str) -> FakeActor:
                outer.actors.append(FakeActor(config, heartbeat))
                if outer.loads_at_once:
                    outer.actors[-1].start.set_result(HANDSHAKE)
                return outer.actors[-1]

        return Class

    def wait(self, promises: list[Promise], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        done = wait(promises, timeout).done
        return list(done), [promise for promise in promises if promise not in done]

    def get(self, promise: Promise) -> Any:
        return promise.result()

    def kill(self, actor: FakeActor) -> None:
        actor.is_killed = True


class FakeProcess:
    def __init__(self, pid: int) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(draft, "ray", fake)
    monkeypatch.setattr(draft, "Process", FakeProcess)
    monkeypatch.setattr(draft, "exit_reason", lambda *_: "died")
    monkeypatch.setattr(draft, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(draft, "WATCH_S", 0.01)
    return fake


@pytest.fixture
def supervisor(ray: FakeRay, tmp_path: Path) -> Iterator[DrafterSupervisor]:  # noqa: ARG001  # it must be there first
    kept = DrafterSupervisor(EngineConfig(model="toy"), DraftEndpoint(f"{tmp_path}/nowhere", 1), {})
    kept.start(64)
    yield kept
    kept.close()


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_first_process_comes_up_before_the_target_has_loaded(ray: FakeRay, tmp_path: Path) -> None:
    config = EngineConfig(model="toy", speculative=NGRAM)
    supervisor = DrafterSupervisor(config, DraftEndpoint(f"{tmp_path}/nowhere", 1), {})
    assert [actor.speculative for actor in ray.actors] == [NGRAM]
    supervisor.start(64)
    assert supervisor.replace(NGRAM) == HANDSHAKE
    assert len(ray.actors) == 1
    supervisor.close()
    assert ray.actors[0].is_killed

    DrafterSupervisor(config, DraftEndpoint(f"{tmp_path}/nowhere", 1), {}).close()  # the target did not load
    assert ray.actors[1].is_killed


def test_a_new_drafter_takes_over_before_the_old_one_ends(ray: FakeRay, supervisor: DrafterSupervisor) -> None:
    assert supervisor.replace(NGRAM) == HANDSHAKE
    ray.loads_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL)
        until(lambda: len(ray.actors) == 2)
        old, new = ray.actors
        assert supervisor.state == ("ready", NGRAM, SMALL, 0)
        new.start.set_result(HANDSHAKE)
        time.sleep(0.1)
        assert not old.is_killed
        assert not replaced.done()
        old.loop.set_result(None)  # the target has dismissed it
        assert replaced.result(10) == HANDSHAKE
    assert old.is_killed
    assert not new.is_killed
    assert supervisor.state == ("ready", SMALL, None, 0)


@pytest.mark.parametrize(
    ("failure", "error", "part"),
    [
        (RayTaskError("start", "…", ConfigError("another vocabulary")), ConfigError, "another vocabulary"),
        (RayTaskError("start", "…", MemoryError("no room")), EngineDeadError, "no room"),
        (RayActorError(), EngineDeadError, "RayActorError"),
    ],
)
def test_one_that_does_not_load_leaves_the_old_one_alone(
    ray: FakeRay, supervisor: DrafterSupervisor, failure: Exception, error: type[Exception], part: str
) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL)
        until(lambda: len(ray.actors) == 2)
        ray.actors[1].start.set_exception(failure)
        with pytest.raises(error, match=part):
            replaced.result(10)
    assert [actor.is_killed for actor in ray.actors] == [False, True]
    assert supervisor.state == ("ready", NGRAM, None, 0)


def test_without_an_algorithm_the_target_dismisses_it_and_nobody_follows(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_before: list[bool] = []
    monkeypatch.setattr(draft, "dismiss", lambda *_: killed_before.append(ray.actors[0].is_killed))
    supervisor.replace(NGRAM)
    assert supervisor.replace(OFF) == NOBODY
    assert killed_before == [False]
    assert ray.actors[0].is_killed
    assert supervisor.state == ("off", OFF, None, 0)
    supervisor.give_up()
    time.sleep(0.1)
    assert len(ray.actors) == 1
    supervisor.replace(SMALL)
    assert supervisor.state.state == "ready"


@pytest.mark.parametrize("is_given_up", [True, False], ids=["given-up", "died"])
def test_a_lost_drafter_is_started_again(ray: FakeRay, supervisor: DrafterSupervisor, is_given_up: bool) -> None:
    supervisor.replace(NGRAM)
    supervisor.give_up() if is_given_up else ray.actors[0].loop.set_exception(RayActorError())
    until(lambda: supervisor.state.num_restarts == 1)
    assert [actor.speculative for actor in ray.actors] == [NGRAM, NGRAM]
    assert ray.actors[0].is_killed


def test_what_is_said_of_a_lost_drafter_while_another_loads_does_not_end_that_one(
    ray: FakeRay, supervisor: DrafterSupervisor
) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    supervisor.give_up()
    until(lambda: len(ray.actors) == 2)
    supervisor.give_up()
    ray.actors[1].start.set_result(HANDSHAKE)
    until(lambda: supervisor.state.num_restarts == 1)
    time.sleep(0.1)
    assert len(ray.actors) == 2


def test_a_restart_gives_way_to_a_new_drafter(ray: FakeRay, supervisor: DrafterSupervisor) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    supervisor.give_up()
    until(lambda: len(ray.actors) == 2)
    assert supervisor.state.state == "loading"
    ray.loads_at_once = True
    supervisor.replace(SMALL)
    assert [actor.is_killed for actor in ray.actors] == [True, True, False]
    assert supervisor.state == ("ready", SMALL, None, 0)


@pytest.mark.parametrize("what", ["restart", "replacement"])
def test_closing_does_not_wait_for_a_drafter_that_loads(ray: FakeRay, supervisor: DrafterSupervisor, what: str) -> None:
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(supervisor.replace, SMALL) if what == "replacement" else None
        if replaced is None:
            supervisor.give_up()
        until(lambda: len(ray.actors) == 2)
        start = time.monotonic()
        supervisor.close()
        assert time.monotonic() - start < 5.0  # a load takes for ever here
        if replaced is not None:
            with pytest.raises(EngineDeadError):
                replaced.result(10)
    assert [actor.is_killed for actor in ray.actors] == [True, True]
    with pytest.raises(EngineDeadError):
        supervisor.replace(SMALL)


def test_a_drafter_that_freezes_while_it_loads_is_given_up_and_another_one_loads(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "FROZEN_S", 0.2)
    supervisor.replace(NGRAM)
    ray.loads_at_once = False
    supervisor.give_up()
    until(lambda: len(ray.actors) == 2)
    _, frozen = ray.actors
    for _ in range(5):
        frozen.heartbeat.beat()
        time.sleep(0.1)
    assert not frozen.is_killed  # it took its time, but ran
    until(lambda: len(ray.actors) == 3)
    assert frozen.is_killed
    ray.actors[2].start.set_result(HANDSHAKE)
    until(lambda: supervisor.state == ("ready", NGRAM, None, 1))


def test_a_drafter_whose_process_never_comes_up_is_given_up(
    ray: FakeRay, supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "UNBORN_S", 0.2)
    ray.loads_at_once = False
    with pytest.raises(EngineDeadError, match="did not start"):
        supervisor.replace(NGRAM)
    assert ray.actors[0].is_killed


def test_a_process_looks_at_its_target_before_it_is_told_to_load(toy: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(toy), speculative=METHODS["EAGLE3"](toy, tmp_path), device="cpu", dtype="float32")
    actor = DraftActor(config, str(tmp_path / "pulse"))
    assert wait([actor._target], 60).done
    assert actor.start(64).max_draft_tokens > 0


def test_a_process_that_finds_no_target_says_so_when_it_is_told_to_load(tmp_path: Path) -> None:
    actor = DraftActor(EngineConfig(model=str(tmp_path / "gone"), speculative=NGRAM), str(tmp_path / "pulse"))
    with pytest.raises(ConfigError, match="nothing is there"):
        actor.start(64)
