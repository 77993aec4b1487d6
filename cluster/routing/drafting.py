"""Replacing the drafter of all engines while serving.

Each desired drafter has a timestamp, and the latest one wins. Routers report the one they have applied in their
heartbeats, and an ingress sends the latest to routers that are behind. Engines that start later and ingresses that did
not receive the operator's request therefore converge. After the last router and ingress have ended, the configuration
applies again. Loading a drafter lives in `cluster.engine.draft`.
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

NOT_LOADED = 409  # HTTP status: a valid request that failed now


class Supervisor(Protocol):
    """Runs and replaces a drafter, see `cluster.engine.draft.DrafterSupervisor`."""

    @property
    def state(self) -> DrafterState: ...

    def replace(self, speculative: SpeculativeConfig) -> DrafterHandshake: ...


class Planner(Protocol):
    """Plans steps for a drafter, see `specray.engine.async_engine.AsyncEngine`."""

    def draft_with(self, speculative: SpeculativeConfig, max_draft_tokens: int) -> None: ...


class DrafterReconciler:
    """The engine's side: applies desired drafters one at a time. `apply` is thread-safe; it blocks during a load."""

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
        """Apply a desired drafter unless a later one has been applied. Returns a refusal if it cannot be loaded."""
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
    """The ingress's side: brings all connected routers to the desired drafter."""

    def __init__(self, configured: SpeculativeConfig, clients: Mapping[str, RouterClient], tasks: Tasks) -> None:
        self._desired = DesiredDrafter(0, configured)
        self._clients = clients
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
        await asyncio.shield(self._tasks.spawn(self._replace(speculative)))

    async def report(self) -> dict[str, Any]:
        """A report of each connected router's drafter, by replica ID."""
        clients = self._connected()
        if not clients:
            raise EngineDeadError(NOT_READY)
        reports = await asyncio.gather(*(client.drafter() for client in clients), return_exceptions=True)
        pairs = zip(clients, reports, strict=True)
        return {client.replica_id: report for client, report in pairs if not isinstance(report, BaseException)}

    def propagate(self) -> None:
        """Send the desired drafter to routers that are behind, once to each."""
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
            # One engine first: if it refuses the drafter, the others need not load it.
            for group in (clients[:1], clients[1:]):
                answers = await asyncio.gather(*(client.apply(desired) for client in group), return_exceptions=True)
                refusals = [answer for answer in answers if isinstance(answer, RequestRefusedError)]
                if refusals or (group and all(isinstance(answer, RouterLostError) for answer in answers)):
                    # Propagated to the engines that have already changed.
                    self._desired = DesiredDrafter(desired.set_at + 1, before.speculative)
                    raise refusals[0] if refusals else EngineDeadError(NOT_READY)
            self._desired = desired

    def _latest(self) -> DesiredDrafter:
        known = [client.desired for client in self._clients.values() if client.desired is not None]
        self._desired = max([self._desired, *known], key=lambda desired: desired.set_at)
        return self._desired

    def _connected(self) -> list[RouterClient]:
        """In the same order at every ingress."""
        clients = [client for client in self._clients.values() if client.info is not None]
        return sorted(clients, key=lambda client: client.replica_id)


def drafter_report(state: DrafterState, accept_length: float | None, snapshot: Snapshot) -> dict[str, Any]:
    """The report of one engine's drafter for `GET /admin/drafter`."""
    return {
        "state": state.state,
        "speculative": state.speculative.model_dump(),
        "loading": state.loading.model_dump() if state.loading is not None else None,
        "accept_length": accept_length,
        "acceptance_collapsed": bool(snapshot["specray_acceptance_collapsed"]),
        "restarts": state.num_restarts,
        "faults": snapshot["specray_draft_faults_total"],
    }
