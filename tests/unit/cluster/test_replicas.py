"""Calls to routers through Serve, without Serve."""

from typing import Any, cast

from ray.serve._private.handle_options import DynamicHandleOptions
from ray.serve.handle import DeploymentHandle

from cluster.ingress.replicas import ServeReplicaDirectory


class Handle:
    """A Serve handle's options, as a deployment's argument has them: those of the process that built it."""

    deployment_name = "Router"

    def __init__(self, options: DynamicHandleOptions = DynamicHandleOptions(_by_reference=True)) -> None:  # noqa: B008
        self.chosen = options

    def options(self, **changes: Any) -> "Handle":
        return Handle(self.chosen.copy_and_update(**changes))


def test_outputs_cross_serve_by_grpc() -> None:
    directory = ServeReplicaDirectory(cast("DeploymentHandle[Any]", Handle()))
    streaming = cast("Handle", directory.handle("a")._streaming).chosen
    assert (streaming.stream, streaming._by_reference) == (True, False)
