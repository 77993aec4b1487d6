"""A Chromium, and a server that it can reach. Both are skipped over where there is no Chromium."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.scripted_server import Serve, Server, listening

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NOT_INSTALLED = "playwright is not installed: run make page-test"
NOT_FOUND = "no Chromium was found: install one (`apt-get install chromium`), or name its program in CHROMIUM"

Running = Callable[..., AbstractContextManager[tuple[str, Server]]]


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    sync_api = pytest.importorskip("playwright.sync_api", reason=NOT_INSTALLED)
    named = os.environ.get("CHROMIUM")
    program = next(filter(None, map(shutil.which, [named] if named else PROGRAMS)), None)
    if program is None:
        pytest.skip(NOT_FOUND)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def running(serve: Serve) -> Running:
    """`with running(**options of serve) as (url, server)`: a server with an event loop in a thread of its own."""

    @contextmanager
    def run(**options: Any) -> Iterator[tuple[str, Server]]:
        started: list[tuple[str, Server]] = []
        is_ready, loop = threading.Event(), asyncio.new_event_loop()
        ends = asyncio.Event()

        async def serving() -> None:
            async with serve(**options) as server, listening(server) as url:
                started.append((url, server))
                is_ready.set()
                await ends.wait()

        def work() -> None:
            try:
                loop.run_until_complete(serving())
            finally:
                is_ready.set()  # whether it started or failed

        thread = threading.Thread(target=work)
        thread.start()
        is_ready.wait()
        try:
            yield started[0]
        finally:
            loop.call_soon_threadsafe(ends.set)
            thread.join()
            loop.close()

    return run
