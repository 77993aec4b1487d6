"""Threads that render and tokenize prompts, beside the event loop and shared fairly by tenants.

Tokenizing a long text takes seconds and releases the interpreter lock. One tenant's long texts occupy at most half of
the threads, so other tenants' requests do not wait for them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

NUM_THREADS = 4
THREADS_PER_TENANT = NUM_THREADS // 2

P = ParamSpec("P")
T = TypeVar("T")


class TextPool:
    """Runs functions in threads, at most THREADS_PER_TENANT at once for one tenant."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "specray-text")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # kept by those who wait

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args, **kwargs)`, once it is the tenant's turn."""
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(THREADS_PER_TENANT))
        async with turn:
            work = self._threads.submit(function, *args, **kwargs)
            return await asyncio.wrap_future(work)
