"""Why an actor has ended: every error that Ray can raise is a reason."""

from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

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


@pytest.mark.parametrize("end", ENDS)
def test_each_error_of_ray_is_a_reason(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, reason = ENDS[end]

    def get(_: object) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", get)
    assert exit_reason("rank 0", object(), "ended") == reason  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ENDS)
def test_each_error_of_ray_at_the_start_is_one_of_ours(end: str) -> None:
    error = start_error("the drafter", ENDS[end][0])
    assert isinstance(error, ConfigError if end == "ours" else EngineDeadError)
    assert "10.0.0.1" not in str(error)
