"""Limits on rendering a chat template: CPU time, and the length of the text.

A template is a program of the model's folder. The sandbox keeps it from the interpreter's objects but not from looping,
and a long conversation can make a harmless one slow. Rendering itself is in `specray.models.tokenizer`.
"""

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_CPU_S = 0.2
MAX_CHARACTERS = 16 * 2**20  # of the rendered text
LINES_PER_CHECK = 32  # reading the thread's clock is a system call


class TemplateLimitError(Exception):
    """A template exceeded a limit."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TemplateLimitError inside the block once this thread has computed for `seconds`.

    Counts CPU time, so that a busy machine refuses nothing, and leaves out the garbage collector, which may look
    through all of a large process in any thread. Works by tracing lines: a single operation in C, such as a regular
    expression, is not interrupted.
    """
    give_up = time.thread_time() + seconds
    num_lines, thread = 0, threading.get_ident()
    started: float | None = None

    def leave_out(phase: str, _info: dict[str, int]) -> None:
        nonlocal give_up, started
        if threading.get_ident() != thread:
            return
        if phase == "start":
            started = time.thread_time()
        elif started is not None:  # the collector skips a callback where another thread removes its own
            give_up += time.thread_time() - started
            started = None

    def check(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal num_lines
        if frame.f_code is leave_out.__code__:
            return None  # the collector would swallow the error, and the tracing would end with it
        num_lines += 1
        if num_lines % LINES_PER_CHECK == 0 and time.thread_time() > give_up:
            raise TemplateLimitError(f"it ran for more than {seconds:g} s")
        return check

    before = sys.gettrace()
    gc.callbacks.append(leave_out)
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.callbacks.remove(leave_out)


def check_length(text: str) -> str:
    """`text`, or TemplateLimitError if it is too long."""
    if len(text) > MAX_CHARACTERS:
        raise TemplateLimitError(f"it wrote {len(text)} characters, more than {MAX_CHARACTERS}")
    return text
