"""The faults: how each is injected, how often, and which endings of requests it allows.

A fault returns once the service has recovered.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import NamedTuple

from specray.bench.exchange import exchange, request_bytes
from tests.chaos.fatal import WAYS, fatal_prompt
from tests.chaos.ledger import Ending, Ledger
from tests.chaos.load import ask_at_once, leave_at_random
from tests.chaos.questions import Question
from tests.chaos.service import NODE, Service, Setting
from tests.support.processes import own_processes

RECOVERY_S = 120.0  # maximum time to recover
POLL_S = 0.3  # each poll costs the service CPU time
MAX_GAP_S = 10.0  # watchdogs take 3 s
QUEUED_S = 30.0  # the last request of a full queue waits for two complete answers
GCS_PAUSE_S = 4.0
GCS_OUTAGE_S = 5.0  # without a GCS, until the operator acts
LOSSY_S = 30.0
NUM_LEAVING = 50
ROUTER, RANK, DRAFTER = "ray::ServeReplica:chaos:Router", "ray::TargetActor", "ray::DraftActor"
INGRESS, CONTROLLER, GCS = "ray::ServeReplica:chaos:OpenAIIngress", "ray::ServeController", "gcs_server"
MOST_LOST = 2  # engines, to one request
DRAFTS = "specray_spec_decode_num_draft_tokens_total"


class FaultContext(NamedTuple):
    """What a fault can use."""

    service: Service
    questions: Sequence[Question]
    ledger: Ledger
    random: random.Random


class Fault(NamedTuple):
    """`inject` injects the fault and waits until the service has recovered."""

    inject: Callable[[FaultContext], Awaitable[None]]
    few: int  # times with --quick
    many: int
    allowed_endings: tuple[Ending, ...] = ()  # allowed besides complete answers
    setting: Setting = Setting.STORED
    max_gap_s: float = MAX_GAP_S  # maximum gap in a stream


def _signal(title: str, number: signal.Signals) -> int:
    """Send a signal to a random process with this title; returns its ID."""
    process = random.choice(own_processes(title))
    os.kill(process, number)
    return process


def _lose_engine(title: str, number: signal.Signals) -> Callable[[FaultContext], Awaitable[None]]:
    async def inject(context: FaultContext) -> None:
        before = await context.service.engines()
        _signal(title, number)

        async def has_another() -> bool:
            return await context.service.engines() != before and await context.service.is_ready()

        await _until(has_another)

    return inject


def _lose_drafter(number: signal.Signals) -> Callable[[FaultContext], Awaitable[None]]:
    async def inject(context: FaultContext) -> None:
        lost = _signal(DRAFTER, number)

        async def is_gone() -> bool:
            return lost not in _processes(DRAFTER)

        await _until(is_gone)
        before = await context.service.by_engine(DRAFTS)

        async def all_draft() -> bool:
            now = await context.service.by_engine(DRAFTS)
            num_drafting = sum(drafts > before[engine] for engine, drafts in now.items())
            return num_drafting == context.service.config.server.num_replicas

        await _until(all_draft)

    return inject


_lose_router = _lose_engine(ROUTER, signal.SIGKILL)


async def _lose_ingress(context: FaultContext) -> None:
    lost = _signal(INGRESS, signal.SIGKILL)

    async def has_another() -> bool:
        return lost not in _processes(INGRESS) and await context.service.is_ready()

    await _until(has_another)


async def _lose_controller(context: FaultContext) -> None:
    lost = _signal(CONTROLLER, signal.SIGKILL)

    async def has_another() -> bool:
        return bool(set(_processes(CONTROLLER)) - {lost}) and await context.service.is_ready()

    await _until(has_another)


async def _freeze_gcs(context: FaultContext) -> None:
    frozen = _signal(GCS, signal.SIGSTOP)
    await asyncio.sleep(GCS_PAUSE_S)
    os.kill(frozen, signal.SIGCONT)
    await _until(context.service.is_ready)


async def _kill_gcs(context: FaultContext) -> None:
    """Kill the GCS and start another one some seconds later, which must read the stored state.

    Killing a router afterwards shows that it did: otherwise no new engine would start. The GCS is started in this
    thread, because it ends with the thread that started it.
    """
    head = context.service.cluster.head_node
    await asyncio.to_thread(head.kill_gcs_server)
    await asyncio.sleep(GCS_PAUSE_S)
    head.start_gcs_server()
    await _until(context.service.is_ready)
    await _lose_router(context)


async def _lose_cluster(context: FaultContext) -> None:
    """Kill a GCS without stored state; the operator stops the cluster and starts another one.

    Ray requires this thread, so that clients do not read meanwhile and see a longer gap.
    """
    context.service.cluster.head_node.kill_gcs_server()
    await asyncio.sleep(GCS_OUTAGE_S)
    context.service.end(can_answer=False)
    context.service.start()
    await _until(context.service.is_ready)


async def _lose_node(context: FaultContext) -> None:
    """Kill all processes of the second node; then a new node joins."""
    cluster, before = context.service.cluster, await context.service.engines()
    node = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    cluster.add_node(**NODE)  # Ray requires this thread, so clients see a longer gap

    async def has_another() -> bool:
        return await context.service.engines() != before and await context.service.is_ready()

    await _until(has_another)


async def _wait(context: FaultContext) -> None:
    """Wait while calls get lost."""
    await asyncio.sleep(LOSSY_S)
    await _until(context.service.is_ready)


async def _redeploy(context: FaultContext) -> None:
    """Deploy another configuration: replicas are drained and replaced one by one."""
    config = context.service.config
    server = config.server.model_copy(update={"log_interval_s": config.server.log_interval_s + 1})
    await asyncio.to_thread(context.service.deploy, config.model_copy(update={"server": server}))
    await _until(context.service.is_ready)


async def _leave(context: FaultContext) -> None:
    seed = context.random.randrange(2**31)
    await leave_at_random(context.service.url, context.questions, NUM_LEAVING, seed, context.ledger)


def _request_of_death(way: str) -> Callable[[FaultContext], Awaitable[None]]:
    async def inject(context: FaultContext) -> None:
        seen = set(await context.service.engines())
        num_engines, streams = len(seen), context.random.random() < 0.5
        body = {"prompt": fatal_prompt(way), "max_tokens": 50, "stream": streams}
        asking = asyncio.create_task(
            exchange(context.service.url, request_bytes(f"{context.service.url}/v1/completions", body), RECOVERY_S)
        )

        async def has_recovered() -> bool:
            seen.update(await context.service.engines())
            return asking.done() and len(seen) > num_engines and await context.service.is_ready()

        await _until(has_recovered)
        reply = await asking
        if b"poison_request" not in reply.body:
            raise TimeoutError(f"the request of death was not given up: {reply.status} {reply.body[-200:]!r}")
        if (num_lost := len(seen) - len(await context.service.engines())) > MOST_LOST:
            raise TimeoutError(f"{num_lost} engines ended with one request; {MOST_LOST} may")

    return inject


async def _flood(context: FaultContext) -> None:
    """Send four times as many requests as can run and wait."""
    config = context.service.config
    count = 4 * len(await context.service.engines()) * (config.max_running_requests + config.max_queued_requests)
    await ask_at_once(context.service.url, context.questions, count, context.ledger)


_LOST_INGRESS = (Ending.CUT, Ending.REFUSED)  # the only ingress, or the proxy's connection to it, can be lost
FAULTS: dict[str, Fault] = {
    "router killed": Fault(_lose_router, 1, 100),
    "router frozen": Fault(_lose_engine(ROUTER, signal.SIGSTOP), 0, 20),
    "rank killed": Fault(_lose_engine(RANK, signal.SIGKILL), 0, 20),
    "rank frozen": Fault(_lose_engine(RANK, signal.SIGSTOP), 0, 20),
    "drafter killed": Fault(_lose_drafter(signal.SIGKILL), 0, 100),
    "drafter frozen": Fault(_lose_drafter(signal.SIGSTOP), 0, 100),
    "drafter sends invalid data": Fault(_lose_drafter(signal.SIGUSR1), 0, 100),
    "ingress killed": Fault(_lose_ingress, 0, 20, _LOST_INGRESS),
    "controller killed": Fault(_lose_controller, 0, 10),
    "GCS frozen for 4 s": Fault(_freeze_gcs, 0, 5),
    "GCS killed for 4 s": Fault(_kill_gcs, 0, 5),
    "node lost": Fault(_lose_node, 0, 10, _LOST_INGRESS, max_gap_s=inf),
    "redeployed": Fault(_redeploy, 0, 20),
    "clients leave": Fault(_leave, 1, 100, (Ending.LEFT, Ending.REFUSED)),
    "overload": Fault(_flood, 0, 10, (Ending.REFUSED,), max_gap_s=QUEUED_S),
    # With two engines there is none for a moment: running requests wait for one, new ones may be refused.
    **{
        f"request of death: {way}": Fault(
            _request_of_death(way), 0, 5, (Ending.REFUSED,), Setting.STORED, max_gap_s=RECOVERY_S
        )
        for way in WAYS
    },
    "GCS lost": Fault(_lose_cluster, 0, 3, _LOST_INGRESS, Setting.VOLATILE, max_gap_s=inf),
    "calls get lost": Fault(_wait, 0, 10, (*_LOST_INGRESS, Ending.FAILED), Setting.LOSSY),
}


def _processes(title: str) -> list[int]:
    """Processes with this title; empty if there are none."""
    try:
        return own_processes(title)
    except AssertionError:
        return []


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not await holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the service did not recover within {RECOVERY_S:g} s")
        await asyncio.sleep(POLL_S)
