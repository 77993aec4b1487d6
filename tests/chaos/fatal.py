"""Requests of death: prompts that make the rank that computes them hang, use all memory or crash.

Ranks of the test cluster are changed by `injection.sitecustomize`; the product knows nothing of such prompts.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MARK = [5, 4, 3, 5, 4, 3, 5, 4, 3]  # the start of such a prompt; the token after it is the way to die
SPARE_BYTES = 256 * 2**20  # of memory that a rank may take before it has none left


def _hang() -> None:
    time.sleep(1e6)


def _use_all_memory() -> None:
    """Of a small limit: this machine has other users."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    hoard = []
    while True:
        hoard.append(bytearray(2**20))


def _crash() -> None:
    """As the kernel ends a process when the machine has no memory left, too."""
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: dict[str, Callable[[], None]] = {"hang": _hang, "memory": _use_all_memory, "crash": _crash}


def fatal_prompt(way: str) -> list[int]:
    return [*MARK, 3 + list(WAYS).index(way)]


def die_of_requests(worker: Any) -> None:
    """Change the class of a rank's worker."""
    begin, ways = worker.begin, list(WAYS.values())
    slots: dict[int, Callable[[], None]] = {}

    def begin_until_death(self: Any, plan: Any) -> None:
        for slot in plan.freed_slots:
            slots.pop(slot, None)
        for new in plan.new_requests:
            if _is_fatal(new.token_ids):
                slots[new.slot] = ways[new.token_ids[len(MARK)] - 3]
        for row in plan.rows:
            if row.slot in slots:
                slots[row.slot]()
        begin(self, plan)

    worker.begin = begin_until_death


def _is_fatal(token_ids: Sequence[int]) -> bool:
    return list(token_ids[: len(MARK)]) == MARK and len(token_ids) > len(MARK)
