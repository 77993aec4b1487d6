"""Counts what Triton's kernels read, by the addresses that they compute in the interpreter."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from triton.runtime import interpreter


def bytes_read(memory: Tensor, run: Callable[[], object]) -> int:
    """Bytes of `memory` that kernels load in `run`."""
    load, begin, total = interpreter.InterpreterBuilder.create_masked_load, memory.data_ptr(), 0

    def counting(self: object, pointers: Any, mask: Any, *rest: object) -> object:
        nonlocal total
        is_inside = (pointers.data >= begin) & (pointers.data < begin + memory.nbytes) & mask.data
        total += int(np.count_nonzero(is_inside)) * memory.itemsize
        return load(self, pointers, mask, *rest)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", counting):
        run()
    return total
