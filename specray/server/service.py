"""The parts of the HTTP server of one ingress replica, put together. Routes live in `app`."""

import asyncio
from collections.abc import Callable

from specray.server.config import ServingConfig
from specray.server.generation import GenerationEndpoints
from specray.server.model import ServedModel
from specray.server.monitoring.tracing import Tracer, check_exporter, exporting_to
from specray.server.operations import OperationEndpoints
from specray.server.responses.store import ResponseStore
from specray.server.routing.router_pool import RouterPool
from specray.server.submission import RequestSubmitter
from specray.server.tokenization import TextPool, Tokenization


class Service:
    """The handlers behind the routes. See `ServedModel` for `load`."""

    def __init__(self, config: ServingConfig, router_pool: RouterPool, load: Callable[[int], Tokenization]) -> None:
        self.config = config
        self.router_pool = router_pool
        self.model = ServedModel(config, router_pool, load)
        self.text_pool = TextPool()
        self.response_store = ResponseStore(config.server.response_store_mib * 2**20)
        self.tracer = make_tracer(config.server.otlp_traces_endpoint)
        self._submitter = RequestSubmitter(config, router_pool, self.model)
        self.generation = GenerationEndpoints(
            config.server, self.model, self._submitter, self.text_pool, self.response_store
        )
        self.operations = OperationEndpoints(config, router_pool, self.model, self._submitter)

    async def close(self) -> None:
        """End the process that compiles grammars, if there is one, and send the last traces."""
        await self._submitter.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


def make_tracer(endpoint: str | None) -> Tracer | None:
    """None without an endpoint. ConfigError if the exporter is missing."""
    check_exporter(endpoint)
    return None if endpoint is None else Tracer(exporting_to(endpoint))
