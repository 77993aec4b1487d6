"""The HTTP ingress as a Serve deployment. It holds no engine state, so any number of replicas can run.

It starts before the routers and answers 503 until one is connected. Routes live in `specray.server.app`.
"""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import AppConfig
from cluster.ingress.replicas import ServeReplicaDirectory
from cluster.process_settings import frozen_garbage_collection, set_log_level
from specray.models.files import target_folder
from specray.models.tokenizer import load_tokenizer
from specray.server.app import create_app
from specray.server.routing.router_pool import RouterPool
from specray.server.service import Service
from specray.server.tokenization import Tokenization


@serve.ingress()
class OpenAIIngress:
    """One ingress replica."""

    def __init__(self, config: AppConfig, router: DeploymentHandle[Any]) -> None:
        set_log_level(config.server.log_level)
        self._router_pool = RouterPool(ServeReplicaDirectory(router), config)
        self._service = Service(
            config, self._router_pool, lambda context_length: _load_tokenization(config, context_length)
        )
        self._router_pool.start()

    async def dtype(self) -> str | None:
        """The type that the engines compute in; None before one is connected."""
        info = self._router_pool.info
        return None if info is None else info.dtype

    async def drain(self) -> int:
        """See `RouterPool.drain`."""
        return await self._router_pool.drain()

    async def __del__(self) -> None:
        """Serve awaits this when the replica stops. Closing lets routers free our requests before the lease expires."""
        await self._service.close()
        await self._router_pool.close()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)


def _load_tokenization(config: AppConfig, context_length: int) -> Tokenization:
    with frozen_garbage_collection():  # a collection of all that an ingress imports takes tenths of a second
        folder = target_folder(config, progress=False)
        return Tokenization(load_tokenizer(folder), context_length)
