"""Who may ask: Host and Origin on every route, a key on every route but the probes.

Pure ASGI, so that a client's disconnect reaches the routes. Loopback is not a trust boundary: a web
page can drive a localhost API, directly (Origin) or through DNS rebinding (Host).
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.server.errors import ApiKeyError, ForbiddenOriginError, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Served without a key: probes carry none, and these two say nothing but yes or no."""


class HostOriginMiddleware:
    """403 unless Host is a name of ours, and Origin, where sent, is the same site or an allowed one."""

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...], cors_origins: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._origins = frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (fault := self._fault(Headers(scope=scope))):
            await error_response(ForbiddenOriginError(fault))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fault(self, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if "*" not in self._hosts and _host_name(host) not in self._hosts:
            return "This server does not answer to that Host; the operator can allow it (allowed_hosts)."
        if not all(self._same_site(origin, host) for origin in headers.getlist("origin")):
            return "Requests from that Origin are not allowed; the operator can allow it (cors_origins)."
        return None

    def _same_site(self, origin: str, host: str) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        return origin.partition("://")[2].lower() == host.lower()


class ApiKeyMiddleware:
    """401 unless `Authorization: Bearer <key>` carries the key, compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._authorized(scope):
            await self._app(scope, receive, send)
        else:
            fault = ApiKeyError("Send the API key as `Authorization: Bearer <key>`; it is missing or wrong.")
            await error_response(fault)(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        """Works on bytes: a key or a header beyond ASCII is just another key."""
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; empty when malformed."""
    try:
        parts = urlsplit(f"//{host}")
    except ValueError:
        return ""
    return "" if "@" in host or parts.path or parts.query else parts.hostname or ""
