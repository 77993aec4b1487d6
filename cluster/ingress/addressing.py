"""A Ray Serve request router that sends each call to one given replica of the Router deployment.

An ingress chooses a router itself (`specray.server.routing`) and keeps a stream open to it, so each call must reach
that replica. Serve runs a request router in the process of every deployment handle. This one selects the addressed
replica and publishes the running replicas to the process.

Serve pickles this module by value, which would copy its variables. The list of replicas therefore lives in `replicas`.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.ingress import replicas


class AddressedRouter(RequestRouter):
    """Sends a call to the replica given by its keyword argument `to`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with `request_router_kwargs`: the name of the `deployment`."""
        self._deployment: str = kwargs["deployment"]

    def update_replicas(self, running: list[RunningReplica]) -> None:
        super().update_replicas(running)
        replicas.set_running(self._deployment, [replica.replica_id.unique_id for replica in running])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The addressed replica. If it is gone, any other, which refuses the call; Serve would retry forever."""
        addressee = None
        if pending_request is not None:
            addressee = pending_request.kwargs.get(replicas.ADDRESSEE)
            pending_request.routing_context.should_backoff = True  # pause between retries
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == addressee]
        return [found or candidate_replicas]
