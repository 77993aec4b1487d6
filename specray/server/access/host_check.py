"""The Host header of a server without API keys.

A web page can make a browser send requests to its own host name after it has pointed that name at the user's machine
(DNS rebinding). The browser's same-origin policy does not stop it, but the Host header still has the page's name. A
server that asks for no key therefore answers only to names that a stranger cannot own.
"""

import re
import socket
from collections.abc import Collection, Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specray.server.errors import ApiError, error_response, short_repr

ANY_HOST = "*"
# RFC 3986, less what no browser sends: escapes, user names, addresses of the future, zones. An empty one names no host.
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]*))(?::[0-9]{0,5})?")
PRIVATE_SUFFIXES = (".localhost", ".internal", ".svc", ".cluster.local")  # cannot be registered


class HostCheck:
    """Answers 403 to requests whose Host is neither an IP address, a private name nor in `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self.app = app
        self._allowed = {name.lower() for name in (*allowed, socket.gethostname(), socket.getfqdn())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (bad := self._refused(scope)) is not None:
            message = (
                f"Host {short_repr(bad)} is not served without API keys; use the server's address, or set "
                "server.allowed_hosts or server.api_key_file"
            )
            await error_response(ApiError(403, message, code="host_not_allowed"))(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refused(self, scope: Scope) -> str | None:
        """The first host that is not allowed. A request without a Host comes from no browser."""
        hosts = Headers(scope=scope).getlist("host")
        return next((host for host in hosts if not is_allowed(host, self._allowed)), None)


def is_allowed(host: str, allowed: Collection[str]) -> bool:
    """Whether a Host header's value, with or without a port, names this server."""
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    if (address := parts["address"]) is not None:
        return _is_address(address, 6)
    name = parts["name"].removesuffix(".").lower()
    return "." not in name or name in allowed or name.endswith(PRIVATE_SUFFIXES) or _is_address(name, 4)


def _is_address(text: str, version: int) -> bool:
    try:
        return ip_address(text).version == version
    except ValueError:
        return False
