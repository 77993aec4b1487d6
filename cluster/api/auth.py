"""Who may ask: a key for every route but a few, and the tenant that a request belongs to.

Denied by default: a route added tomorrow needs a key without anybody thinking of it. The decision is made on the path
that the server has parsed, never on one put together from headers. Not here: the keys (`keys`).
"""

from collections.abc import Collection
from typing import Annotated

from fastapi import Depends, Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.errors import ApiError, error_response
from cluster.api.keys import KeyRing

PROBES = frozenset({"/livez", "/readyz", "/health"})  # what asks here has no keys, and learns nothing but a status
METRICS = "/metrics"
ADMIN = "/admin/"  # beginning of the routes that need an admin's key, and are shut where none is configured
TENANT = "tenant"  # in the request's state


class RequireKey:
    """Lets requests with the right key through, and those to `open_paths`; the others get 401.

    `keys` open every route but an admin's; None: a server without keys, on which only an admin's routes are shut.
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
            await _refusal()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _tenant(self, scope: Scope) -> str | None:
        """The owner of a request's key, empty where none is needed; None: it may not pass."""
        path = _route(scope)
        keys = self._admin_keys if path.startswith(ADMIN) else self._keys
        if path in self._open_paths or (keys is None and not path.startswith(ADMIN)):
            return ""
        key = _bearer(scope)
        return keys.owner(key) if keys is not None and key is not None else None


async def _tenant_of(request: Request) -> str:
    name: str = getattr(request.state, TENANT, "")
    return name


Tenant = Annotated[str, Depends(_tenant_of)]  # parameter of a route: whose key it was asked with; empty without keys


def _route(scope: Scope) -> str:
    """The path below the application's prefix, as the router sees it."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def _bearer(scope: Scope) -> bytes | None:
    """The key a request was sent with, None without exactly one."""
    values = Headers(scope=scope).getlist("authorization")
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def _refusal() -> Response:
    error = ApiError(401, "no valid API key; send one in the header Authorization: Bearer KEY", code="invalid_api_key")
    response = error_response(error)
    response.headers["www-authenticate"] = "Bearer"
    return response
