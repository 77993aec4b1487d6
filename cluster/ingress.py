"""The HTTP front as a Serve deployment. It holds no engine state: any number of replicas may run.

It comes up before the router does and answers 503 until then. Not here: routes and shapes (`openai`).
"""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cluster.client import RouterClient
from cluster.config import AppConfig
from cluster.connections import Item, Refusal
from cluster.openai.app import create_app
from cluster.openai.service import Service
from cluster.openai.tokenization import Tokenization
from specray.engine.request import EngineRequest
from specray.metrics import Snapshot
from specray.models.files import resolve_model
from specray.models.tokenizer import load_tokenizer


class HandlePort:
    """A Serve handle to the Router, as `client.RouterPort`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def outputs(self, connection_id: str) -> AsyncIterator[Item]:
        stream = self._streaming.outputs.remote(connection_id)
        assert isinstance(stream, DeploymentResponseGenerator)
        async for item in stream:
            yield item

    async def submit(self, connection_id: str, requests: list[EngineRequest]) -> Refusal | None:
        refusal: Refusal | None = await self._handle.submit.remote(connection_id, requests)
        return refusal

    async def abort(self, request_ids: list[str]) -> None:
        await self._handle.abort.remote(request_ids)

    async def renew(self, connection_id: str) -> bool:
        is_known: bool = await self._handle.renew.remote(connection_id)
        return is_known

    async def stats(self) -> Snapshot:
        snapshot: Snapshot = await self._handle.stats.remote()
        return snapshot


@serve.ingress()
class OpenAIIngress:
    """One replica of the HTTP front."""

    def __init__(self, config: AppConfig, router: DeploymentHandle[Any]) -> None:
        client = RouterClient(HandlePort(router), config.server.lease_s)
        self._service = Service(config, client, lambda: _load_tokenization(config))
        client.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)


def _load_tokenization(config: AppConfig) -> Tokenization:
    folder = resolve_model(config.model, config.revision, config.load_format, progress=False)
    return Tokenization(load_tokenizer(folder))
