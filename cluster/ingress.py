"""The HTTP front as a Serve deployment. It holds no engine state: any number of replicas may run.

It comes up before the router does and answers 503 until then. Not here: routes and shapes (`openai`).
"""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import AppConfig
from cluster.fleet import Fleet
from cluster.openai.app import create_app
from cluster.openai.service import Service
from cluster.openai.tokenization import Tokenization
from cluster.replicas import HandleDirectory
from specray.models.files import resolve_model
from specray.models.tokenizer import load_tokenizer


@serve.ingress()
class OpenAIIngress:
    """One replica of the HTTP front."""

    def __init__(self, config: AppConfig, router: DeploymentHandle[Any]) -> None:
        self._fleet = Fleet(HandleDirectory(router), config)
        self._service = Service(config, self._fleet, lambda: _load_tokenization(config))
        self._fleet.start()

    async def drain(self) -> int:
        """See `Fleet.drain`."""
        return await self._fleet.drain()

    async def __del__(self) -> None:
        """Serve awaits it when nothing is left to answer: routers would wait for our lease to run out."""
        await self._fleet.close()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)


def _load_tokenization(config: AppConfig) -> Tokenization:
    folder = resolve_model(config.model, config.revision, config.load_format, progress=False)
    return Tokenization(load_tokenizer(folder))
