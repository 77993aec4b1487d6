"""Calls to one replica of the Router deployment: Ray Serve's request router, put to use.

An ingress chooses its router itself (`routing`), holds a stream with it and fences it; so a call has to reach the one
replica it is meant for. Serve gives every deployment handle a request router in the handle's own process, which knows
the replicas that run and picks among them: this one picks the addressee, and tells the process whom it has seen.

Serve pickles this module by value: a class of another module is the same everywhere, a variable in here would not be.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.routing import replicas


class AddressedRouter(RequestRouter):
    """Sends a call to the replica that its argument `to` names."""

    def update_replicas(self, running: list[RunningReplica]) -> None:
        super().update_replicas(running)
        replicas.set_running(
            [(replica.replica_id.deployment_id.name, replica.replica_id.unique_id) for replica in running]
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The addressee. If it is gone any other will do, which refuses the call: else Serve would look for ever."""
        wanted = None
        if pending_request is not None:
            wanted = pending_request.kwargs.get(replicas.ADDRESSEE)
            pending_request.routing_context.should_backoff = True  # or it would be looked for without a pause
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        return [found or candidate_replicas]
