"""Authentication: checks API keys and sets the tenant of each request.

Access is denied by default, so a new route requires a key. The check uses the path that the server parsed, never one
assembled from headers. Key files are read in `keys`.
"""

from collections.abc import Collection
from typing import Annotated

from fastapi import Depends, Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specray.server.access.keys import KeyRing
from specray.server.errors import ApiError, error_response

PING = "/ping"  # of SageMaker
PROBES = frozenset({"/livez", "/readyz", "/health", PING})  # no key required; the response holds only a status
METRICS = "/metrics"
FLUSH_CACHE = "/flush_cache"  # SGLang's name of an admin route
ADMIN = "/admin/"  # prefix of admin routes, which are closed unless admin keys are configured
TENANT = "tenant"  # in the request's state


class RequireKey:
    """Middleware that passes requests with a valid key and requests to `open_paths`.

    Others get 401, or 403 for a key of the other kind.

    `keys` open all routes except admin routes, which need one of `admin_keys`. With `keys=None`, only admin routes
    require a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing | None,
        admin_keys: KeyRing | None = None,
        open_paths: Collection[str] = PROBES,
    ) -> None:
        self.app = app
        self._keys = keys
        self._admin_keys = admin_keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif (name := self._tenant(scope)) is not None:
            scope.setdefault("state", {})[TENANT] = name
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._refusal(scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _tenant(self, scope: Scope) -> str | None:
        """The owner of the request's key, empty where no key is required; None if the request is rejected."""
        path = _route(scope)
        keys = self._admin_keys if _is_admin(path) else self._keys
        if path in self._open_paths or (keys is None and not _is_admin(path)):
            return ""
        key = _key(scope)
        return keys.owner(key) if keys is not None and key is not None else None

    def _refusal(self, scope: Scope) -> Response:
        no_rights = "this key has no admin rights; send one of server.admin_key_file"
        if self._admin_keys is None and _is_admin(_route(scope)):
            no_rights = "this server has no admin keys; the operator can start it with server.admin_key_file"
            if self._keys is None:
                return error_response(ApiError(403, no_rights, code="insufficient_permissions"))
        for keys, problem in (
            (self._keys, no_rights),
            (self._admin_keys, "this key is for the admin routes only; send one of server.api_key_file"),
        ):
            if keys is not None and (key := _key(scope)) is not None and keys.owner(key) is not None:
                return error_response(ApiError(403, problem, code="insufficient_permissions"))
        error = ApiError(
            401, "missing or invalid API key; send the header Authorization: Bearer KEY", code="invalid_api_key"
        )
        response = error_response(error)
        response.headers["www-authenticate"] = "Bearer"
        return response


async def _tenant_of(request: Request) -> str:
    name: str = getattr(request.state, TENANT, "")
    return name


Tenant = Annotated[str, Depends(_tenant_of)]  # route parameter: owner of the request's key; empty without keys


def _is_admin(path: str) -> bool:
    return path.startswith(ADMIN) or path == FLUSH_CACHE


def _route(scope: Scope) -> str:
    """The path below the application's prefix, as FastAPI's router sees it."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def _key(scope: Scope) -> bytes | None:
    """The request's bearer token, or its X-Api-Key, which Anthropic's clients send; None unless it has exactly one."""
    headers = Headers(scope=scope)
    values = headers.getlist("authorization")
    if not values and len(keys := headers.getlist("x-api-key")) == 1:
        return keys[0].strip().encode("latin-1")
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else None
