"""Ranks on a CPU run after the processes that serve."""

import os
import threading

import pytest

from cluster import process_settings
from cluster.config import AppConfig
from cluster.engine.executor import rank_environment
from tests.support.forked import call


def test_only_processes_without_a_gpu_compute_after_others() -> None:
    assert process_settings.NICENESS not in rank_environment(AppConfig(), has_gpu=True)
    niceness = rank_environment(AppConfig(), has_gpu=False)[process_settings.NICENESS]
    assert int(niceness) == process_settings.COMPUTING_NICENESS


@pytest.mark.parametrize(("niceness", "added"), [("", 0), ("3", 3), ("0", 0)])
def test_threads_that_start_afterwards_have_the_lower_priority(niceness: str, added: int) -> None:
    ended = call(f"{__name__}:lower", **{process_settings.NICENESS: niceness} if niceness else {})
    assert ended.status == 0, ended.output
    before, own, heartbeat, later = map(int, ended.output.split())
    assert before == heartbeat  # its thread started first
    assert own == later == max(before, int(niceness or 0))
    if before == 0:
        assert own == added


def lower() -> None:
    """Print this thread's niceness before and after, that of a thread that started before, and of one after."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    is_lowered, found = threading.Event(), []

    def heartbeat() -> None:
        is_lowered.wait()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    first = threading.Thread(target=heartbeat)
    first.start()
    process_settings.lower_priority_from_environment()
    is_lowered.set()
    first.join()
    later = threading.Thread(target=heartbeat)
    later.start()
    later.join()
    print(before, os.getpriority(os.PRIO_PROCESS, 0), *found)
