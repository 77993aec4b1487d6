"""What the executor decides by itself: the ranks' threads, and when a step has taken too long."""

import socket
import time

import pytest

from cluster.config import AppConfig
from cluster.engine.executor import RayExecutor, rank_threads
from specray.channel import Channel
from specray.errors import EngineDeadError


@pytest.mark.parametrize(
    ("options", "num_cores", "expected"),
    [({}, 2, 1), ({}, 1, 1), ({}, 16, 15), ({"tp_size": 2}, 16, 7), ({"tp_size": 2}, 2, 1), ({"num_threads": 2}, 2, 2)],
)
def test_ranks_leave_a_core_to_the_processes_around_them(
    options: dict[str, int], num_cores: int, expected: int
) -> None:
    assert rank_threads(AppConfig.model_validate(options), num_cores) == expected


def test_a_step_that_never_ends_is_the_end_of_its_ranks() -> None:
    """All live and say so, but one skipped a collective that the others wait in."""
    ours, theirs = socket.socketpair()
    executor = object.__new__(RayExecutor)
    executor._channel, executor._step_timeout_s = Channel(ours, 1), 0.5
    executor._sentinels, executor._watchdogs, executor._failure = [], None, None
    start = time.monotonic()
    with ours, theirs, pytest.raises(EngineDeadError, match=r"did not end within server.step_timeout_s=0.5"):
        executor.collect()
    assert time.monotonic() - start >= 0.5
    assert executor.failure() is not None, "the keeper of the house sees it as well"
