"""Why an actor has ended: every error that Ray can raise is a reason."""

from typing import Any

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from cluster.liveness import actors
from cluster.liveness.actors import exit_reason, start_error
from specray.errors import ConfigError, EngineDeadError

ENDS = {
    "memory": (OutOfMemoryError("a message with 10.0.0.1"), "was ended by Ray, because its node had no memory left"),
    "died": (RayActorError(), "died"),
    "crashed": (WorkerCrashedError(), "was lost: WorkerCrashedError"),
    "node": (NodeDiedError("10.0.0.1"), "was lost: NodeDiedError"),
    "unavailable": (ActorUnavailableError("gone", None), "died"),
    "bug": (RayTaskError("loop", "...", KeyError("a path")), "failed: KeyError"),
    "ours": (RayTaskError("loop", "...", ConfigError("x does not fit")), "failed: ConfigError: x does not fit"),
}


BROKEN = RayTaskError("loop", "...", RuntimeError("Connection closed by peer"))
RUNS = object()


class FakeRay:
    """Sentinels are what tasks raised, None for one that returned, and RUNS. `later` ends by the time of a wait."""

    def __init__(self, later: object = RUNS) -> None:
        self._later, self._now = later, later

    def wait(self, sentinels: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        assert num_returns == len(sentinels)
        if timeout:
            self._now = RUNS
        ended = [each for each in sentinels if each not in (RUNS, self._now)]
        return ended, [each for each in sentinels if each not in ended]

    def get(self, sentinel: object) -> None:
        if isinstance(sentinel, Exception):
            raise sentinel


@pytest.mark.parametrize("end", ENDS)
def test_each_error_of_ray_is_a_reason(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, reason = ENDS[end]
    monkeypatch.setattr(actors, "ray", FakeRay())
    assert exit_reason(["rank 0"], [error], "ended") == f"rank 0 {reason}"  # type: ignore[list-item]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("end", ["memory", "died", "node", "ours"])
def test_the_actor_that_ended_the_others_is_named(end: str, is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives of the others break, which may be reported first."""
    error, reason = ENDS[end]
    monkeypatch.setattr(actors, "ray", FakeRay(later=error if is_late else RUNS))
    sentinels: list[Any] = [BROKEN, error, None]
    assert exit_reason(["rank 0", "rank 1", "rank 2"], sentinels, "ended") == f"rank 1 {reason}"


def test_the_first_of_equal_reasons_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ray", FakeRay())
    sentinels: list[Any] = [RUNS, BROKEN, BROKEN]
    assert exit_reason(["rank 0", "rank 1", "rank 2"], sentinels, "ended") == "rank 1 failed: RuntimeError"


@pytest.mark.parametrize("end", ENDS)
def test_each_error_of_ray_at_the_start_is_one_of_ours(end: str) -> None:
    error = start_error("the drafter", ENDS[end][0])
    assert isinstance(error, ConfigError if end == "ours" else EngineDeadError)
    assert "10.0.0.1" not in str(error)
