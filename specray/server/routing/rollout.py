"""Replacing the drafter of all engines while they serve.

Each desired drafter has a timestamp, and the latest one wins. Routers report the one they have applied in their
heartbeats, and an ingress sends the latest to routers that are behind. Engines that start later and ingresses that did
not receive the operator's request therefore converge. After the last router and ingress have ended, the configuration
applies again. One engine's part lives in `cluster.engine.reconciler`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specray.config import SpeculativeConfig
from specray.errors import EngineDeadError
from specray.server import OPERATOR_LOG
from specray.server.routing.client import NOT_READY, RequestRefusedError, RouterCalls, RouterClient, RouterLostError
from specray.server.routing.messages import DesiredDrafter
from specray.server.tasks import Tasks

RETRY_S, LONGEST_RETRY_S = 5.0, 300.0  # between attempts to bring an engine up to date; the time doubles

logger = logging.getLogger(OPERATOR_LOG)


class DrafterRollout:
    """Brings all routers to the desired drafter.

    `clients` are this ingress's connections by replica ID; `routers` returns all routers, in an order that is equal at
    every ingress. Routers that only other ingresses are connected to are brought up to date there.
    """

    def __init__(
        self,
        configured: SpeculativeConfig,
        clients: Mapping[str, RouterClient],
        routers: Callable[[], Sequence[RouterCalls]],
        tasks: Tasks,
    ) -> None:
        self._desired = DesiredDrafter(0, configured)
        self._clients = clients
        self._routers = routers
        self._tasks = tasks
        self._sent: dict[RouterClient, DesiredDrafter] = {}
        self._replacing = asyncio.Lock()

    @property
    def speculative(self) -> SpeculativeConfig:
        """Options of the desired drafter."""
        return self._latest().speculative

    async def replace(self, speculative: SpeculativeConfig) -> None:
        """Replace the drafter of every engine, or of none. SpecRayError with the first refusal.

        Cancelling the caller does not stop it.
        """
        await asyncio.shield(self._tasks.spawn(self._change(lambda _: speculative, is_whole=True)))

    async def change(self, change: Callable[[SpeculativeConfig], SpeculativeConfig]) -> None:
        """Replace the drafter by one whose options `change` makes of the present ones. Raises what `change` raises.

        It is refused if another ingress has changed them at the same time.
        """
        await asyncio.shield(self._tasks.spawn(self._change(change, is_whole=False)))

    async def report(self) -> dict[str, Any]:
        """A report of each router's drafter, by replica ID."""
        routers = self._routers()
        if not routers:
            raise EngineDeadError(NOT_READY)
        reports = await asyncio.gather(*(router.drafter() for router in routers), return_exceptions=True)
        pairs = zip(routers, reports, strict=True)
        return {router.replica_id: report for router, report in pairs if not isinstance(report, BaseException)}

    def propagate(self) -> None:
        """Send the desired drafter to routers that are behind, until they have it."""
        if self._replacing.locked():
            return
        desired = self._latest()
        self._sent = {client: sent for client, sent in self._sent.items() if self._is_known(client)}
        for client in self._clients.values():
            is_behind = client.desired is not None and client.desired.set_at < desired.set_at
            if is_behind and self._sent.get(client) != desired:
                self._sent[client] = desired
                self._tasks.spawn(self._send(client, desired))

    async def _send(self, client: RouterClient, desired: DesiredDrafter) -> None:
        """Bring one router up to date, in as many attempts as it takes while this is what is desired."""
        wait_s = RETRY_S
        while self._sent.get(client) == desired:
            try:
                await client.apply(desired)
                return
            except (RequestRefusedError, RouterLostError) as error:
                logger.warning(
                    "the engine %s has not taken the drafter that others have, and is asked again in %g s: %s",
                    client.replica_id,
                    wait_s,
                    error,
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    async def _change(self, change: Callable[[SpeculativeConfig], SpeculativeConfig], *, is_whole: bool) -> None:
        async with self._replacing:
            if not (routers := self._routers()):
                raise EngineDeadError(NOT_READY)
            before = self._latest()
            set_at, made_from = max(time.time_ns(), before.set_at + 1), None if is_whole else before.set_at
            desired = DesiredDrafter(set_at, change(before.speculative), made_from)
            # Try one engine first: if it refuses the drafter, the others need not load it.
            for group in (routers[:1], routers[1:]):
                answers = await asyncio.gather(*(router.apply(desired) for router in group), return_exceptions=True)
                refusals = [answer for answer in answers if isinstance(answer, RequestRefusedError)]
                if refusals and group == routers[:1]:
                    raise refusals[0]  # nothing has changed
                if refusals or (group and all(isinstance(answer, RouterLostError) for answer in answers)):
                    # Propagated to the engines that have already changed.
                    self._desired = DesiredDrafter(desired.set_at + 1, before.speculative)
                    raise refusals[0] if refusals else EngineDeadError(NOT_READY)
            self._desired = desired

    def _latest(self) -> DesiredDrafter:
        known = [client.desired for client in self._clients.values() if client.desired is not None]
        self._desired = max([self._desired, *known], key=lambda desired: desired.set_at)
        return self._desired

    def _is_known(self, client: RouterClient) -> bool:
        """Whether it is its replica's present connection."""
        return self._clients.get(client.replica_id) is client
