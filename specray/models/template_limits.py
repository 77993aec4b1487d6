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
MAX_COMPILATION_S = 5.0  # once for each template; that of gpt-oss takes 0.3 s
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
    collecting_since: float | None = None

    def begin_collection(phase: str, _info: dict[str, int]) -> None:
        nonlocal collecting_since
        if phase == "start" and threading.get_ident() == thread:
            collecting_since = time.thread_time()

    def end_collection(phase: str, _info: dict[str, int]) -> None:
        nonlocal give_up, collecting_since
        if phase == "stop" and threading.get_ident() == thread and collecting_since is not None:
            give_up += time.thread_time() - collecting_since
            collecting_since = None

    def check(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal num_lines
        # The collector runs others' callbacks and finalizers. It would swallow the error, and the tracing would end.
        if collecting_since is not None or frame.f_code is begin_code or frame.f_code is end_code:
            return None
        num_lines += 1
        if num_lines % LINES_PER_CHECK == 0 and time.thread_time() > give_up:
            raise TemplateLimitError(f"it ran for more than {seconds:g} s")
        return check

    # Shared with the callbacks of other threads, which run in this one, too. Compared as objects: to compare two code
    # objects by value near the limit of recursion is a SystemError in Python 3.11.
    begin_code, end_code = begin_collection.__code__, end_collection.__code__
    before = sys.gettrace()
    gc.callbacks.insert(0, begin_collection)
    gc.callbacks.append(end_collection)
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.callbacks.remove(begin_collection)
        gc.callbacks.remove(end_collection)


def check_length(text: str) -> str:
    """`text`, or TemplateLimitError if it is too long."""
    if len(text) > MAX_CHARACTERS:
        raise TemplateLimitError(f"it wrote {len(text)} characters, more than {MAX_CHARACTERS}")
    return text
