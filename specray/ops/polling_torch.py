"""Waiting for a number that another process writes: the reference of a kernel, by the host."""

import time

from torch import Tensor

_POLL_S = 5e-5


def await_number(flag: Tensor, number: int, timeout_s: float) -> bool:
    """Whether `flag` int64 [1] is `number` within some seconds."""
    until = time.monotonic() + timeout_s
    while int(flag) != number:
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True
