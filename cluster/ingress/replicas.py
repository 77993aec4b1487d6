"""The running replicas of the Router deployment, and calls to one of them through Ray Serve."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from specray.server.routing.client import RouterHandle
from specray.server.routing.messages import Item
from specray.server.routing.subset import IngressPlace

logger = logging.getLogger("ray.serve")

ADDRESSEE = "to"  # keyword argument of every call with the replica's ID, read by `addressing`

_running: dict[str, frozenset[str]] = {}  # deployment -> replica IDs, set by this process's request routers
_subscribers: list[Callable[[], object]] = []


def set_running(deployment: str, replica_ids: Iterable[str]) -> None:
    """Set the running replicas of a deployment, which Serve's controller has pushed to this process."""
    _running[deployment] = frozenset(replica_ids)
    for changed in _subscribers:
        changed()


class ServeReplicaDirectory:
    """`specray.server.routing.router_pool.ReplicaDirectory` over a Serve handle to the Router deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        # gRPC instead of Ray objects halves the ingress's CPU time per streamed output. gRPC does not report a replica
        # that freezes or whose machine disappears; the ingress detects those by missing heartbeats. Serve has a
        # variable for it, but a handle that is a deployment's argument keeps the choice of the process that built the
        # application.
        self._handle = handle.options(_by_reference=False)
        self._first_call: object = None

    def replica_ids(self) -> Collection[str]:
        if self._first_call is None:  # a handle discovers replicas after its first call
            self._first_call = self._handle.stats.remote()
        return _running.get(self._handle.deployment_name, frozenset())

    def handle(self, replica_id: str) -> RouterHandle:
        return cast("RouterHandle", ServeRouterHandle(self._handle, replica_id))

    def place(self) -> IngressPlace:
        context = serve.get_replica_context()
        return IngressPlace(context.rank.rank, context.world_size)

    def subscribe(self, changed: Callable[[], object]) -> None:
        _subscribers.append(changed)

    def lost_nodes(self) -> Collection[str]:
        try:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
        except RayError as error:
            logger.warning("Ray did not list its nodes: %s", type(error).__name__)
            return []
        return [node["NodeID"] for node in nodes if not node["Alive"]]


class ServeRouterHandle:
    """`specray.server.routing.client.RouterHandle` over a Serve handle, for one replica.

    Calls run in an empty context, outside the current HTTP request. Within it, Serve would cancel them when the client
    disconnects. It would also give concurrent calls the same request ID, and its request router would then leave one of
    them waiting forever.
    """

    def __init__(self, handle: DeploymentHandle[Any], replica_id: str) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._to: dict[str, Any] = {ADDRESSEE: replica_id}

    async def outputs(self, connection_id: str) -> AsyncIterator[Item]:
        stream = self._call(self._streaming.outputs, connection_id)
        assert isinstance(stream, DeploymentResponseGenerator)
        try:
            async for item in stream:
                yield item
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Any other method of a RouterHandle: the router's of the same name."""
        if name.startswith("_") or not hasattr(RouterHandle, name):
            raise AttributeError(name)
        return partial(self._answer, getattr(self._handle, name))

    async def _answer(self, method: DeploymentHandle[Any], *arguments: object) -> Any:
        """Call and await. A cancelled call is cancelled in Serve, too, which would retry a dead replica forever."""
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
