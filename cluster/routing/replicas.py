"""The replicas of the Router deployment, as one process sees them, and calls to one of them.

Not here: how a call finds its addressee (`addressing`), and what is said (`client`).
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from cluster.engine.connections import DesiredDrafter, Item, Refusal
from specray.engine.request import EngineRequest
from specray.metrics import Snapshot

ADDRESSEE = "to"  # the keyword argument of every call that names the replica

_running: dict[str, frozenset[str]] = {}  # deployment -> replicas, as this process's request routers last knew them


def set_running(replicas: Sequence[tuple[str, str]]) -> None:
    """All replicas of one deployment, as (deployment, replica)."""
    if replicas:  # of none it is not known whose they were; calls to them will fail
        _running[replicas[0][0]] = frozenset(replica_id for _, replica_id in replicas)


class ServeReplicaDirectory:
    """`router_pool.ReplicaDirectory` over a Serve handle to the Router deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._first_call: object = None

    def replica_ids(self) -> Collection[str]:
        if self._first_call is None:  # a handle looks for replicas once it is called
            self._first_call = self._handle.stats.remote()
        return _running.get(self._handle.deployment_name, frozenset())

    def handle(self, replica_id: str) -> "ServeRouterHandle":
        return ServeRouterHandle(self._handle, replica_id)


class ServeRouterHandle:
    """`client.RouterHandle` over a Serve handle: one replica of it.

    Calls are made outside of the HTTP request at hand. Serve would cancel them when its client leaves, and it gives all
    calls of a request one id, by which its router finds the call to go on: of two at a time, one looks for ever.
    """

    def __init__(self, handle: DeploymentHandle[Any], replica_id: str) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._to = {ADDRESSEE: replica_id}

    async def outputs(self, connection_id: str) -> AsyncIterator[Item]:
        stream = self._call(self._streaming.outputs, connection_id)
        assert isinstance(stream, DeploymentResponseGenerator)
        try:
            async for item in stream:
                yield item
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]

    async def submit(self, connection_id: str, requests: list[EngineRequest]) -> Refusal | None:
        refusal: Refusal | None = await self._answer(self._handle.submit, connection_id, requests)
        return refusal

    async def abort(self, request_ids: list[str]) -> None:
        await self._answer(self._handle.abort, request_ids)

    async def renew(self, connection_id: str, num_refused: int) -> bool:
        is_known: bool = await self._answer(self._handle.renew, connection_id, num_refused)
        return is_known

    async def stats(self) -> Snapshot:
        snapshot: Snapshot = await self._answer(self._handle.stats)
        return snapshot

    async def drafter(self) -> dict[str, Any]:
        report: dict[str, Any] = await self._answer(self._handle.drafter)
        return report

    async def apply(self, desired: DesiredDrafter) -> Refusal | None:
        refusal: Refusal | None = await self._answer(self._handle.apply, desired)
        return refusal

    async def drain(self) -> None:
        await self._answer(self._handle.drain)

    async def _answer(self, method: DeploymentHandle[Any], *arguments: object) -> Any:
        """Call and await; a call that is given up is taken back, or it would look for a dead addressee for ever."""
        response = self._call(method, *arguments)
        assert isinstance(response, DeploymentResponse)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise

    def _call(
        self, method: DeploymentHandle[Any], *arguments: object
    ) -> DeploymentResponse[Any] | DeploymentResponseGenerator[Any]:
        return contextvars.Context().run(method.remote, *arguments, **self._to)
