"""How many CPU cores this process may use."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")  # a container sees its own limits here


def num_cores() -> int:
    """Cores of this process's affinity, but no more than its cgroup's CPU quota allows, rounded down; at least 1."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas()])))


def _quotas() -> Iterator[float]:
    """CPUs that the quota of cgroup v2 or v1 allows; nothing without a quota."""
    files = [("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")]
    for names in files:
        try:
            quota, period = map(int, " ".join((CGROUPS / name).read_text() for name in names).split())
        except (OSError, ValueError):  # unlimited: `max`
            continue
        if quota >= 0 and period > 0:  # unlimited: -1
            yield quota / period
