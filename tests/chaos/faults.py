"""What is done to the service, how often, and which endings of a request each fault excuses.

A fault breaks something and returns once the service is as it was. Not here: clients (`load`).
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import NamedTuple

from tests.chaos.ledger import Ending, Ledger
from tests.chaos.load import ask_at_once, leave_at_random
from tests.chaos.questions import Question
from tests.chaos.service import NODE, Service, Setting
from tests.support.processes import own_processes

RECOVERY_S = 120.0  # a service that is not back by then is not coming back
LOOK_S = 0.3  # each look is the service's work, too
MOST_GAP_S = 10.0  # a stream that is silent for longer is as good as lost; our watchdogs take 3 s
QUEUED_S = 30.0  # a full queue's last one waits for two others' whole answers, its stream open and silent
GCS_PAUSE_S = 4.0
UNNOTICED_S = 5.0  # without a GCS, before an operator sees it
LOSSY_S = 30.0
NUM_LEAVING = 50
ROUTER, RANK, DRAFTER = "ray::ServeReplica:chaos:Router", "ray::TargetActor", "ray::DraftActor"
INGRESS, CONTROLLER, GCS = "ray::ServeReplica:chaos:OpenAIIngress", "ray::ServeController", "gcs_server"
DRAFTS = "specray_spec_decode_num_draft_tokens_total"


class Scene(NamedTuple):
    """What a fault may use."""

    service: Service
    questions: Sequence[Question]
    ledger: Ledger
    random: random.Random


class Fault(NamedTuple):
    """`strike` breaks something and waits until it is whole again."""

    strike: Callable[[Scene], Awaitable[None]]
    few: int  # times in the short form; 0: not in it
    many: int
    excused: tuple[Ending, ...] = ()  # beside complete answers
    setting: Setting = Setting.STORED
    most_gap_s: float = MOST_GAP_S  # the longest silence in any stream


def _signal(title: str, number: signal.Signals) -> int:
    """Send it to one process of this title, any; which one."""
    process = random.choice(own_processes(title))
    os.kill(process, number)
    return process


def _lose_engine(title: str, number: signal.Signals) -> Callable[[Scene], Awaitable[None]]:
    async def strike(scene: Scene) -> None:
        before = await scene.service.engines()
        _signal(title, number)

        async def has_another() -> bool:
            return await scene.service.engines() != before and await scene.service.is_whole()

        await _until(has_another)

    return strike


def _lose_drafter(number: signal.Signals) -> Callable[[Scene], Awaitable[None]]:
    async def strike(scene: Scene) -> None:
        lost = _signal(DRAFTER, number)

        async def is_gone() -> bool:
            return lost not in _processes(DRAFTER)

        await _until(is_gone)
        before = await scene.service.by_engine(DRAFTS)

        async def all_draft() -> bool:
            now = await scene.service.by_engine(DRAFTS)
            num_drafting = sum(drafts > before[engine] for engine, drafts in now.items())
            return num_drafting == scene.service.config.server.num_replicas

        await _until(all_draft)

    return strike


_lose_router = _lose_engine(ROUTER, signal.SIGKILL)


async def _lose_ingress(scene: Scene) -> None:
    lost = _signal(INGRESS, signal.SIGKILL)

    async def has_another() -> bool:
        return lost not in _processes(INGRESS) and await scene.service.is_whole()

    await _until(has_another)


async def _lose_controller(scene: Scene) -> None:
    lost = _signal(CONTROLLER, signal.SIGKILL)

    async def has_another() -> bool:
        return bool(set(_processes(CONTROLLER)) - {lost}) and await scene.service.is_whole()

    await _until(has_another)


async def _freeze_gcs(scene: Scene) -> None:
    frozen = _signal(GCS, signal.SIGSTOP)
    await asyncio.sleep(GCS_PAUSE_S)
    os.kill(frozen, signal.SIGCONT)
    await _until(scene.service.is_whole)


async def _kill_gcs(scene: Scene) -> None:
    """For some seconds there is none; the next one reads what this one wrote, and can start a new engine.

    One that had read nothing would not be noticed before an engine is lost. A GCS ends with the thread that started it:
    not with one of the event loop's helpers, then.
    """
    head = scene.service.cluster.head_node
    await asyncio.to_thread(head.kill_gcs_server)
    await asyncio.sleep(GCS_PAUSE_S)
    head.start_gcs_server()
    await _until(scene.service.is_whole)
    await _lose_router(scene)


async def _lose_cluster(scene: Scene) -> None:
    """The GCS dies and with it all that it knew; an operator ends the rest and starts anew.

    In this thread, as Ray demands: clients do not read meanwhile, and see a longer gap.
    """
    scene.service.cluster.head_node.kill_gcs_server()
    await asyncio.sleep(UNNOTICED_S)
    scene.service.end(can_answer=False)
    scene.service.start()
    await _until(scene.service.is_whole)


async def _lose_node(scene: Scene) -> None:
    """All of the second node's processes at once; then a new node joins."""
    cluster, before = scene.service.cluster, await scene.service.engines()
    node = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    cluster.add_node(**NODE)  # in this thread, as Ray demands: clients do not read meanwhile, and see a longer gap

    async def has_another() -> bool:
        return await scene.service.engines() != before and await scene.service.is_whole()

    await _until(has_another)


async def _wait(scene: Scene) -> None:
    """What is to happen happens by itself."""
    await asyncio.sleep(LOSSY_S)
    await _until(scene.service.is_whole)


async def _redeploy(scene: Scene) -> None:
    """A new configuration: replica after replica is drained and replaced."""
    config = scene.service.config
    server = config.server.model_copy(update={"log_interval_s": config.server.log_interval_s + 1})
    await asyncio.to_thread(scene.service.deploy, config.model_copy(update={"server": server}))
    await _until(scene.service.is_whole)


async def _leave(scene: Scene) -> None:
    seed = scene.random.randrange(2**31)
    await leave_at_random(scene.service.url, scene.questions, NUM_LEAVING, seed, scene.ledger)


async def _flood(scene: Scene) -> None:
    """Four times as many requests at once as may run and wait."""
    config = scene.service.config
    count = 4 * len(await scene.service.engines()) * (config.max_running_requests + config.max_queued_requests)
    await ask_at_once(scene.service.url, scene.questions, count, scene.ledger)


_LOST_FRONT = (Ending.CUT, Ending.REFUSED)  # the only ingress, or Serve's proxy's way to it, may be among the lost
FAULTS: dict[str, Fault] = {
    "router killed": Fault(_lose_router, 1, 100),
    "router frozen": Fault(_lose_engine(ROUTER, signal.SIGSTOP), 0, 20),
    "rank killed": Fault(_lose_engine(RANK, signal.SIGKILL), 0, 20),
    "rank frozen": Fault(_lose_engine(RANK, signal.SIGSTOP), 0, 20),
    "drafter killed": Fault(_lose_drafter(signal.SIGKILL), 0, 100),
    "drafter frozen": Fault(_lose_drafter(signal.SIGSTOP), 0, 100),
    "drafter lies": Fault(_lose_drafter(signal.SIGUSR1), 1, 100),
    "ingress killed": Fault(_lose_ingress, 0, 20, _LOST_FRONT),
    "controller killed": Fault(_lose_controller, 0, 10),
    "GCS frozen for 4 s": Fault(_freeze_gcs, 0, 5),
    "GCS killed for 4 s": Fault(_kill_gcs, 0, 5),
    "node lost": Fault(_lose_node, 0, 10, _LOST_FRONT, most_gap_s=inf),
    "redeployed": Fault(_redeploy, 0, 20),
    "clients leave": Fault(_leave, 2, 100, (Ending.LEFT, Ending.REFUSED)),
    "overload": Fault(_flood, 0, 10, (Ending.REFUSED,), most_gap_s=QUEUED_S),
    "GCS lost": Fault(_lose_cluster, 0, 3, _LOST_FRONT, Setting.FORGETFUL, most_gap_s=inf),
    "calls get lost": Fault(_wait, 0, 10, (*_LOST_FRONT, Ending.FAILED), Setting.LOSSY),
}


def _processes(title: str) -> list[int]:
    """Those there are, if any."""
    try:
        return own_processes(title)
    except AssertionError:
        return []


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not await holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the service was not whole again after {RECOVERY_S:g} s")
        await asyncio.sleep(LOOK_S)
