"""Routes of vLLM and SGLang that report on the server or act on its engines, apart from those that generate text."""

from importlib.metadata import version
from typing import Any, Self

from fastapi import FastAPI, Response
from pydantic import model_validator

from specray.errors import InvalidRequestError
from specray.server.access.auth import FLUSH_CACHE, PING, Tenant
from specray.server.schemas.body import Body, RequestName
from specray.server.service import Service

Json = dict[str, Any]


class AbortRequest(Body):
    """Body of /abort_request. Only requests of the client's own key are aborted."""

    rid: RequestName | None = None  # the request's own `rid`, or the ID of its reply
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if (self.rid is None) == (not self.abort_all):
            raise InvalidRequestError("send exactly one of rid and abort_all=true", "rid")
        return self


def add_engine_routes(app: FastAPI, service: Service) -> None:
    @app.get("/version")
    async def server_version() -> Json:
        return {"version": version("specray")}

    @app.post(PING, response_class=Response)
    @app.get(PING, response_class=Response)
    async def ping() -> Response:
        await service.operations.check_health()
        return Response()

    @app.get("/health_generate")
    async def health_generate() -> Json:
        await service.operations.check_generation()
        return {"status": "ok"}

    @app.get("/load")
    async def load() -> Json:
        return {"server_load": await service.operations.num_requests()}

    @app.get("/get_model_info")
    @app.get("/model_info", include_in_schema=False)
    async def model_info() -> Json:
        return await service.model.details()

    @app.get("/server_info")
    @app.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Json:
        return await service.operations.server_info()

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest, tenant: Tenant) -> Json:
        await service.router_pool.abort(tenant, body.rid)
        return {}

    @app.post(FLUSH_CACHE)
    async def flush_cache() -> Json:
        return {"replicas": await service.router_pool.flush_caches()}
