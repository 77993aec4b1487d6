"""The routes: a FastAPI application over a `Service`. Runs under Ray Serve and, in tests, without it."""

from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cluster.openai import errors
from cluster.openai.middleware import BodyLimit, CatchErrors
from cluster.openai.prometheus import CONTENT_TYPE, prometheus_text
from cluster.openai.protocol import ChatRequest, CompletionRequest, GenerateRequest
from cluster.openai.service import Service
from specray.errors import SpecRayError

Json = dict[str, Any]


def create_app(service: Service) -> FastAPI:
    """The whole HTTP surface of one ingress replica."""
    app = FastAPI(title="SpecRay", openapi_url="/openapi.json")
    app.add_middleware(BodyLimit, max_bytes=service.config.server.max_body_bytes)
    app.add_middleware(CatchErrors)
    app.add_exception_handler(errors.ApiError, errors.handle_api_error)
    app.add_exception_handler(SpecRayError, errors.handle_engine_error)
    app.add_exception_handler(RequestValidationError, errors.handle_validation_error)
    app.add_exception_handler(HTTPException, errors.handle_http_error)
    _add_openai_routes(app, service)
    _add_sglang_routes(app, service)
    _add_operator_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest) -> Response:
        return await service.chat(body)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        return await service.completion(body)

    @app.get("/v1/models")
    async def models() -> Json:
        return service.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        return service.model(name)


def _add_sglang_routes(app: FastAPI, service: Service) -> None:
    @app.post("/generate")
    async def generate(body: GenerateRequest) -> Response:
        return await service.generate(body)

    @app.get("/get_model_info")
    async def get_model_info() -> Json:
        return service.model_info()

    @app.get("/server_info")
    async def server_info() -> Json:
        return await service.server_info()


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Json:
        await service.check_health()
        return {"status": "ok"}

    @app.get("/livez")
    async def livez() -> Json:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> Json:
        service.check_ready()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus_text(await service.stats()), media_type=CONTENT_TYPE)
