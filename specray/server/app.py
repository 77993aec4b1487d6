"""HTTP routes: a FastAPI application over a `Service`, which tests run without Ray Serve."""

from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse

from specray.errors import SpecRayError
from specray.server import errors
from specray.server.access.auth import METRICS, PROBES, RequireKey, Tenant
from specray.server.access.host_check import ANY_HOST, HostCheck
from specray.server.access.keys import KeyRing
from specray.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from specray.server.chat.protocol import ChatRequest
from specray.server.completions.protocol import CompletionRequest
from specray.server.config import ServerConfig
from specray.server.generate.protocol import GenerateRequest
from specray.server.generation import IGNORED_FIELDS_HEADER
from specray.server.middleware import BodyLimit, CatchErrors, JsonRoute
from specray.server.monitoring.prometheus import CONTENT_TYPE, prometheus_text
from specray.server.monitoring.tracing import TraceRequests
from specray.server.responses.protocol import InputTokensRequest, ResponsesRequest
from specray.server.routes.admin import add_admin_routes
from specray.server.routes.engine import add_engine_routes
from specray.server.routes.page import PAGE_PATHS, add_page_routes
from specray.server.routes.tokenize import add_tokenize_routes
from specray.server.service import Service

Json = dict[str, Any]

_ERROR = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
_ERROR_CONTENT = {"application/json": {"schema": _ERROR}}
# Of every route, in /openapi.json.
ERROR_RESPONSES: dict[int | str, Json] = {
    "4XX": {"description": "The request cannot be answered; the message says why", "content": _ERROR_CONTENT},
    "5XX": {"description": "The server cannot answer now, or not within the timeout", "content": _ERROR_CONTENT},
}

# Of generating routes: one object, or with `stream` events.
REPLIES: dict[int | str, Json] = {
    200: {
        "content": {
            "application/json": {"schema": {"type": ["object", "array"]}},
            "text/event-stream": {"schema": {"type": "string"}},
        }
    }
}


def create_app(service: Service) -> FastAPI:
    """The application of one ingress replica, with all routes and middleware."""
    # Without FastAPI's pages of documentation, which load scripts from another server, and its redirects, whose
    # address comes from the request's Host header.
    app = FastAPI(
        title="SpecRay",
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERROR_RESPONSES,
    )
    app.router.route_class = JsonRoute
    server = service.config.server
    app.add_middleware(BodyLimit, max_bytes=server.max_body_bytes, timeout_s=server.body_timeout_s)
    app.add_middleware(RequireKey, **_access(server))  # runs before BodyLimit, which reads the body
    if server.api_key_file is None and ANY_HOST not in server.allowed_hosts:
        app.add_middleware(HostCheck, allowed=server.allowed_hosts)
    if server.cors_origins:
        _allow_origins(app, server.cors_origins)
    app.add_middleware(CatchErrors)
    if service.tracer is not None:
        app.add_middleware(TraceRequests, tracer=service.tracer)
    app.add_exception_handler(errors.ApiError, errors.handle_api_error)
    app.add_exception_handler(SpecRayError, errors.handle_engine_error)
    app.add_exception_handler(RequestValidationError, errors.handle_validation_error)
    app.add_exception_handler(HTTPException, errors.handle_http_error)
    _add_openai_routes(app, service)
    _add_anthropic_routes(app, service)
    _add_speculation_routes(app, service)
    _add_sglang_routes(app, service)
    add_tokenize_routes(app, service)
    add_engine_routes(app, service)
    _add_operator_routes(app, service)
    if server.ui:
        add_page_routes(app)
    if server.admin_key_file is not None:
        add_admin_routes(app, service.config, service.router_pool.drafter_rollout)
    return app


def _allow_origins(app: FastAPI, origins: list[str]) -> None:
    """Answer the preflight requests of these origins' pages, which have no key. Cookies are never used."""
    exposed = [IGNORED_FIELDS_HEADER, "retry-after"]
    app.add_middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
    )


def _access(config: ServerConfig) -> dict[str, Any]:
    keys = KeyRing.read(config.api_key_file, "server.api_key_file") if config.api_key_file else None
    admin_keys = KeyRing.read(config.admin_key_file, "server.admin_key_file") if config.admin_key_file else None
    open_paths = PROBES | ({METRICS} if config.open_metrics else set()) | (PAGE_PATHS if config.ui else set())
    return {"keys": keys, "admin_keys": admin_keys, "open_paths": open_paths}


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=REPLIES)
    async def chat_completions(body: ChatRequest, tenant: Tenant) -> Response:
        return await service.generation.chat(body, tenant)

    @app.post("/v1/completions", responses=REPLIES)
    async def completions(body: CompletionRequest, tenant: Tenant) -> Response:
        return await service.generation.completion(body, tenant)

    @app.post("/v1/responses", responses=REPLIES)
    async def responses(body: ResponsesRequest, tenant: Tenant) -> Response:
        return await service.generation.response(body, tenant)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: InputTokensRequest, tenant: Tenant) -> Json:
        return {"object": "response.input_tokens", "input_tokens": await service.generation.count_tokens(body, tenant)}

    # Without it, the route of stored responses would answer clients that look for compaction with a 405.
    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> None:
        raise errors.ApiError(
            404, "SpecRay does not compact conversations; send the conversation's items, or fewer of them"
        )

    @app.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str, tenant: Tenant) -> Json:
        return service.response_store.get(tenant, response_id).reply

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, tenant: Tenant) -> Json:
        service.response_store.delete(tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/models")
    async def models() -> Json:
        return service.model.listing()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        return service.model.entry(name)


def _add_anthropic_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", responses=REPLIES)
    async def messages(body: MessagesRequest, tenant: Tenant) -> Response:
        return await service.generation.message(body, tenant)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, tenant: Tenant) -> Json:
        return {"input_tokens": await service.generation.count_tokens(body, tenant)}


def _add_speculation_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/speculation/capabilities")
    async def capabilities() -> Json:
        return service.model.capabilities()


def _add_sglang_routes(app: FastAPI, service: Service) -> None:
    @app.post("/generate", responses=REPLIES)
    async def generate(body: GenerateRequest, tenant: Tenant) -> Response:
        return await service.generation.generate(body, tenant)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> Json:
        return await service.operations.check_health()

    @app.get("/livez")
    @app.head("/livez", include_in_schema=False)
    async def livez() -> Json:
        return {"status": "ok"}

    @app.get("/readyz")
    @app.head("/readyz", include_in_schema=False)
    async def readyz() -> Json:
        service.operations.check_ready()
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        alias_model = service.config.model_name if service.config.server.metric_aliases else None
        return Response(prometheus_text(await service.router_pool.stats(), alias_model), media_type=CONTENT_TYPE)
