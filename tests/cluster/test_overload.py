"""Ray Serve under overload, with clients that disconnect at any byte, and during a redeployment."""

import asyncio
import json
import os
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import pytest

from specray.bench.ledger import Outcome
from specray.bench.open_loop import Load, idle_after, run
from tests.cluster.conftest import KEY, LONG, Redeployment
from tests.support.processes import own_processes, wait_until

IDLE_S = 10.0  # for a busy machine; the goal is 2 s
SPARE = 5  # descriptors that Ray itself opens and closes


def test_a_full_queue_refuses_at_once(app: Any) -> None:
    """Four requests are admitted; the others are refused before any of the four has ended."""
    report = asyncio.run(run(Load(app.url, 20.0, 4.0, max_tokens=400)))
    ledger = report.ledger
    print(f"{ledger.num_begun} sent, {ledger.statuses()}, refused in {report.refusal_s(0.5):.3f} s")
    assert not ledger.violations()
    assert {ending.status for ending in ledger.endings.values()} == {200, 429}
    assert report.refusal_s(0.5) < min(ending.seconds for ending in ledger.of(Outcome.COMPLETE))
    assert asyncio.run(idle_after(app.url)) < IDLE_S


@pytest.fixture(scope="module")
def warm_app(large_app: Any) -> Any:
    """large_app after some requests, so that every process has opened its long-lived files."""
    asyncio.run(run(Load(large_app.url, 20.0, 1.0, max_tokens=2, key=KEY)))
    return large_app


def test_keys_are_required_behind_serves_proxy(large_app: Any) -> None:
    statuses = [httpx.get(f"{large_app.url}{path}").status_code for path in ("/v1/models", "/metrics", "/livez")]
    assert statuses == [401, 401, 200]
    large_app.complete(**LONG | {"max_tokens": 2})


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_disconnect_at_any_byte_leak_nothing(warm_app: Any, stream: bool) -> None:
    before = descriptors()
    load = Load(warm_app.url, 20.0, 3.0, max_tokens=150, stream=stream, cut_share=1.0, key=KEY, seed=stream)
    ledger = asyncio.run(run(load)).ledger
    print(f"{ledger.num_begun} sent, {ledger.statuses()}")
    assert not ledger.violations()
    assert ledger.count(Outcome.ABORTED) > ledger.num_begun / 3, ledger.endings
    assert asyncio.run(idle_after(warm_app.url, KEY)) < IDLE_S
    deadline = time.monotonic() + IDLE_S
    while any(num > before.get(process, num) + SPARE for process, num in descriptors().items()):
        assert time.monotonic() < deadline, (before, descriptors())
        time.sleep(0.1)


def descriptors() -> dict[int, int]:
    """Numbers of open files and sockets of the proxy and every replica. One of an earlier test may end meanwhile."""
    titles = ("ray::ProxyActor", "ray::ServeReplica:app:OpenAIIngress", "ray::ServeReplica:app:Router")
    found = {}
    for process in (process for title in titles for process in own_processes(title)):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # the last one is a zombie's
            found[process] = len(os.listdir(f"/proc/{process}/fd"))
    return found


def test_a_redeployment_lets_streams_finish(redeployment: Redeployment) -> None:
    """Open streams finish, and every other request is served or refused with Retry-After."""
    statuses = Counter(reply.status_code for reply in redeployment.replies)
    print(f"streams meanwhile: {statuses}")
    assert set(statuses) <= {200, 503}
    assert statuses[200] >= 2  # a slow machine finishes no more than the two that were open
    for reply in redeployment.replies:
        if reply.status_code == 200:
            assert text_of(reply) == redeployment.expected
        else:
            assert "retry-after" in reply.headers
    app = redeployment.app
    wait_until(lambda: app.http.get("/server_info").status_code == 200, seconds=60.0)
    assert app.http.get("/server_info").json()["server"]["request_timeout_s"] == 500.0


def text_of(reply: httpx.Response) -> str:
    *events, done = reply.text.strip().split("\n\n")
    assert done == "data: [DONE]", reply.text[-300:]
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)
