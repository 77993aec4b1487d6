"""Counts the work of Python code in a way that does not depend on the machine's speed."""

import sys
from collections.abc import Callable
from types import FrameType


def num_python_calls(work: Callable[[], object]) -> int:
    """Calls of Python functions while `work` runs."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG001
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
