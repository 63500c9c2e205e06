"""The middleware that lets a request in: it finds the key that the request sends, and compares the key's role with what
the route needs."""

from __future__ import annotations

import base64

from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.server.access.keys import ANYONE, KeyRing, NamedKey
from mlx_parallm.server.access.roles import OPEN_PATHS, RouteTable
from mlx_parallm.server.errors import ApiKeyError, RoleError, error_response
from mlx_parallm.server.http.request_log import record_of


class Guard:
    """Answers 401 unless the request sends a key that the ring has, and 403 if the key's role may not use the route.
    The paths of `OPEN_PATHS` need no key.

    A key is sent as `Authorization: Bearer <key>` or, as the SDKs of Tinker and Anthropic do, as `X-API-Key: <key>`.
    Clients that can only put the key into a URL, such as http://any:KEY@localhost:8000, send it as the password of HTTP
    Basic.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, table: RouteTable) -> None:
        self._app = app
        self._ring = ring
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._key_of(scope)
        if key is None:
            fault = ApiKeyError("Send the API key as `Authorization: Bearer <key>`; it is missing or wrong.")
            await error_response(fault)(scope, receive, send)
            return
        record_of(scope).key = key
        needed = self._table.needed(scope["method"], scope["path"])
        if needed is None or key.role.allows(needed.role):
            await self._app(scope, receive, send)
        else:
            await error_response(RoleError.needing(needed.role, key.role))(scope, receive, send)

    def _key_of(self, scope: Scope) -> NamedKey | None:
        if not self._ring.required:
            return ANYONE
        sent = _sent_key(scope)
        return None if sent is None else self._ring.find(sent)


def _sent_key(scope: Scope) -> bytes | None:
    """The key in the headers, which need not be ASCII; None if there is none, or more than one."""
    sent = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    if len(sent) != 1:
        return None
    ((name, value),) = sent
    if name == b"x-api-key":
        return bytes(value.strip())
    scheme, _, credentials = bytes(value).partition(b" ")
    if scheme.lower() == b"basic":
        return _password(credentials.strip())
    return credentials.strip() if scheme.lower() == b"bearer" else None


def _password(credentials: bytes) -> bytes:
    """The password of HTTP Basic credentials; empty if they are malformed."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""
