"""The executor's thread count and step timeout."""

import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from cluster.config import AppConfig
from cluster.engine.executor import RayExecutor, rank_threads
from cluster.liveness.actors import Place
from specray.channel import Channel
from specray.errors import EngineDeadError
from specray.step import DraftFault, StepResult, StepTimes
from specray.step_wire import pack


@pytest.mark.parametrize(
    ("options", "num_cores", "expected"),
    [
        ({}, 2, 2),
        ({}, 1, 1),
        ({}, 3, 2),
        ({}, 16, 15),
        ({"tp_size": 2}, 16, 7),
        ({"tp_size": 2}, 2, 1),
        ({"num_threads": 1}, 2, 1),
    ],
)
def test_ranks_leave_a_core_for_other_processes(options: dict[str, int], num_cores: int, expected: int) -> None:
    assert rank_threads(AppConfig.model_validate(options), num_cores) == expected


def test_ranks_that_ray_does_not_start_are_an_error_with_their_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(calls: list[object], timeout: float) -> object:
        raise GetTimeoutError(f"{len(calls)} calls have no result after {timeout:g} s")

    monkeypatch.setattr(ray, "get", get)
    executor = object.__new__(RayExecutor)
    executor._actors = [SimpleNamespace(place=SimpleNamespace(remote=object))] * 2
    wanted = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    with pytest.raises(EngineDeadError, match=re.escape(f"in the bundles {wanted} within 60 s; `ray status`")):
        executor._places(wanted)


def test_a_step_that_exceeds_its_timeout_fails_the_engine() -> None:
    """All ranks run, but one skipped a collective operation that the others wait for."""
    ours, theirs = socket.socketpair()
    executor = object.__new__(RayExecutor)
    executor._channel, executor._step_timeout_s = Channel(ours, 1), 0.5
    executor._sentinels, executor._watchdogs, executor._failure, executor._drafter = [], None, None, None
    start = time.monotonic()
    with ours, theirs, pytest.raises(EngineDeadError, match=r"did not end within server.step_timeout_s=0.5"):
        executor.collect()
    assert time.monotonic() - start >= 0.5
    assert executor.failure() is not None


@pytest.mark.parametrize("kind", DraftFault)
def test_a_fault_after_which_the_target_keeps_its_drafter_does_not_replace_it(kind: DraftFault) -> None:
    """One of several drafters that is broken must not end the process of the others, again and again."""
    ours, theirs = socket.socketpair()
    executor, reports = object.__new__(RayExecutor), []
    executor._channel, executor._step_timeout_s = Channel(ours, 1), 5.0
    executor._drafter = SimpleNamespace(report_fault=lambda: reports.append(kind))  # type: ignore[assignment]
    with ours, theirs:
        Channel(theirs, 1).send(pack(StepResult(1, [], StepTimes(0.0, 0.0, 0.0, 0.0), [kind])))
        executor.collect()
    kept = {DraftFault.LATE, DraftFault.MEMBER_NOT_A_NUMBER, DraftFault.NO_HANDSHAKE}
    assert bool(reports) == (kind not in kept)


def test_the_rank_that_does_not_start_is_named_while_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failure = RayTaskError("start", "...", RuntimeError("no free port"))

    def get(start: int) -> None:
        assert start == 1
        raise failure

    monkeypatch.setattr(ray, "wait", lambda starting, timeout: ([starting[1]], [starting[0]]))  # noqa: ARG005
    monkeypatch.setattr(ray, "get", get)
    executor = object.__new__(RayExecutor)
    executor._folder = SimpleNamespace(name=str(tmp_path))
    executor._watchdogs = SimpleNamespace(heartbeat_paths=["", ""])
    starts = [SimpleNamespace(remote=lambda *_, rank=rank: rank) for rank in range(2)]
    executor._actors = [SimpleNamespace(start=start) for start in starts]
    with pytest.raises(EngineDeadError, match=r"^rank 1 of the target did not start: RuntimeError: no free port$"):
        executor._start([Place.here()], None)
