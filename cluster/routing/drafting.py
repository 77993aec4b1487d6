"""Which drafter the engines are to have, and how all of them come to have it.

An operator's wish has a time, and the latest one counts. A router says in its pulses which wish it follows; an ingress
that sees one behind tells it of the latest. So all agree before long, engines that start later and ingresses that were
not asked included; when the last router and ingress have ended, the configuration counts again. Not here: loading a
drafter (`draft`), HTTP (`openai.admin`).
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from cluster.engine.connections import DesiredDrafter, Refusal
from cluster.engine.draft import DrafterState
from cluster.routing.client import NOT_READY, RequestRefusedError, RouterClient, RouterLostError
from cluster.tasks import Tasks
from specray.config import SpeculativeConfig
from specray.errors import ConfigError, EngineDeadError, SpecRayError
from specray.metrics import Snapshot
from specray.worker.remote_drafter.handshake import DrafterHandshake

NOT_LOADED = 409  # HTTP status: the request is right, and cannot be granted now


class Supervisor(Protocol):
    """What has a drafter and can have another one: `draft.DrafterSupervisor`."""

    @property
    def state(self) -> DrafterState: ...

    def replace(self, speculative: SpeculativeConfig) -> DrafterHandshake: ...


class Planner(Protocol):
    """What plans steps with a drafter in mind: `specray.engine.async_engine.AsyncEngine`."""

    def draft_with(self, speculative: SpeculativeConfig, max_draft_tokens: int) -> None: ...


class DrafterReconciler:
    """One engine's side: follows wishes, one after the other. `apply` waits for a drafter to load; any thread may."""

    def __init__(
        self, configured: SpeculativeConfig, max_draft_tokens: int, supervisor: Supervisor, planner: Planner
    ) -> None:
        self.desired = DesiredDrafter(0, configured)
        self._configured = configured
        self.max_draft_tokens = max_draft_tokens
        self._supervisor = supervisor
        self._planner = planner
        self._applying = threading.Lock()

    def apply(self, desired: DesiredDrafter) -> Refusal | None:
        """Have the drafter that was wished for, unless there was a later wish; why not, where it cannot be had."""
        with self._applying:
            if desired.set_at <= self.desired.set_at:
                return None
            if desired.speculative != self.desired.speculative:
                try:
                    self._replace(desired.speculative)
                except SpecRayError as error:
                    return Refusal(400 if isinstance(error, ConfigError) else NOT_LOADED, str(error), None)
            self.desired = desired
            return None

    def _replace(self, speculative: SpeculativeConfig) -> None:
        self._configured.check_successor(speculative)
        self.max_draft_tokens = self._supervisor.replace(speculative).max_draft_tokens
        self._planner.draft_with(speculative, self.max_draft_tokens)


class DrafterRollout:
    """One ingress's side: all connected routers, by replica."""

    def __init__(self, configured: SpeculativeConfig, clients: Mapping[str, RouterClient], tasks: Tasks) -> None:
        self._desired = DesiredDrafter(0, configured)
        self._clients = clients
        self._tasks = tasks
        self._sent: dict[RouterClient, DesiredDrafter] = {}
        self._replacing = asyncio.Lock()

    @property
    def speculative(self) -> SpeculativeConfig:
        """What the engines draft with, or are about to."""
        return self._latest().speculative

    async def replace(self, speculative: SpeculativeConfig) -> None:
        """Have every engine draft like that, or none. SpecRayError with the first refusal; then all go on as before.

        It goes on though the caller is cancelled.
        """
        await asyncio.shield(self._tasks.spawn(self._replace(speculative)))

    async def report(self) -> dict[str, Any]:
        """What drafts for each connected router now, as plain data."""
        clients = self._connected()
        if not clients:
            raise EngineDeadError(NOT_READY)
        reports = await asyncio.gather(*(client.drafter() for client in clients), return_exceptions=True)
        pairs = zip(clients, reports, strict=True)
        return {client.replica_id: report for client, report in pairs if not isinstance(report, BaseException)}

    def propagate(self) -> None:
        """Tell those that are behind; each is told of a wish once."""
        if self._replacing.locked():
            return
        desired = self._latest()
        self._sent = {client: sent for client, sent in self._sent.items() if client.replica_id in self._clients}
        for client in self._connected():
            is_behind = client.desired is not None and client.desired.set_at < desired.set_at
            if is_behind and self._sent.get(client) != desired:
                self._sent[client] = desired
                self._tasks.spawn(client.apply(desired))

    async def _replace(self, speculative: SpeculativeConfig) -> None:
        async with self._replacing:
            if not (clients := self._connected()):
                raise EngineDeadError(NOT_READY)
            before = self._latest()
            desired = DesiredDrafter(max(time.time_ns(), before.set_at + 1), speculative)
            # One alone first: what it refuses, the others need not load.
            for group in (clients[:1], clients[1:]):
                answers = await asyncio.gather(*(client.apply(desired) for client in group), return_exceptions=True)
                refusals = [answer for answer in answers if isinstance(answer, RequestRefusedError)]
                if refusals or (group and all(isinstance(answer, RouterLostError) for answer in answers)):
                    self._desired = DesiredDrafter(
                        desired.set_at + 1, before.speculative
                    )  # spread to those that have changed
                    raise refusals[0] if refusals else EngineDeadError(NOT_READY)
            self._desired = desired

    def _latest(self) -> DesiredDrafter:
        known = [client.desired for client in self._clients.values() if client.desired is not None]
        self._desired = max([self._desired, *known], key=lambda desired: desired.set_at)
        return self._desired

    def _connected(self) -> list[RouterClient]:
        """In an order that every ingress sees alike."""
        clients = [client for client in self._clients.values() if client.info is not None]
        return sorted(clients, key=lambda client: client.replica_id)


def drafter_report(state: DrafterState, accept_length: float | None, snapshot: Snapshot) -> dict[str, Any]:
    """What an operator is told of one engine's drafter."""
    return {
        "state": state.state,
        "speculative": state.speculative.model_dump(),
        "loading": state.loading.model_dump() if state.loading is not None else None,
        "accept_length": accept_length,
        "acceptance_collapsed": bool(snapshot["specray_acceptance_collapsed"]),
        "restarts": state.num_restarts,
        "faults": snapshot["specray_draft_faults_total"],
    }
