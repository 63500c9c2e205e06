"""The middleware that lets a request in: it finds the key that the request sends, and compares the key's role with what
the route needs."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from mlx_parallm.errors import OverloadedError, RoleError
from mlx_parallm.server.access.attempts import Attempts
from mlx_parallm.server.access.audit import AuditLog
from mlx_parallm.server.access.keys import ANYONE, NamedKey
from mlx_parallm.server.access.roles import UNDECLARED, Access, Role
from mlx_parallm.server.access.sessions import LOGIN, PAGES, Sessions, from_own_page
from mlx_parallm.server.errors import ApiKeyError, MethodError, UnknownRouteError, error_response
from mlx_parallm.server.http.request_log import address_of, client_of, record_of
from mlx_parallm.server.routing import Endpoint

MAX_CHANGES = 64
"""Control actions of one client that may be under way at a time. They run one after another, and to their end even if
the client leaves, so without a limit one client's could keep all others' waiting."""


ABSENT = frozenset({("POST", "/v1/responses/compact")})
"""Routes of OpenAI's that are not here, and whose last part a route takes for an id: 404 says more than 405."""


class Guard:
    """Answers 401 unless the request sends a key that the ring has, 429 after too many wrong ones, and 403 if the key's
    role may not use the route that would answer. Requests that no route would answer end here, with 404 or 405.

    A key is sent as `Authorization: Bearer <key>` or, as the SDKs of Tinker and Anthropic do, as `X-API-Key: <key>`, or
    as both, if they have the same key.
    Clients that can only put the key into a URL, such as http://any:KEY@localhost:8000, send it as the password of HTTP
    Basic. People who have logged in have a cookie instead, which counts only where no key is sent.

    Args:
        routes: those of the app's router.
        audit: gets a line for each control action, also for those that are refused. None: there is no such log.
    """

    def __init__(
        self,
        app: ASGIApp,
        attempts: Attempts,
        sessions: Sessions,
        routes: Sequence[BaseRoute],
        audit: AuditLog | None = None,
    ) -> None:
        self._app = app
        self._attempts = attempts
        self._sessions = sessions
        self._routes = routes
        self._audit = audit
        self._changes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no route takes WebSockets
            await (WebSocketClose() if scope["type"] == "websocket" else self._app)(scope, receive, send)
            return
        try:
            access, app = needed(self._routes, scope), self._app
        except (UnknownRouteError, MethodError) as error:
            access, app = Access(Role.INFERENCE), error_response(error)
        try:
            app = app if access.role is None else self._admitted(scope, app, access.role)
            await (self._changed if access.audited and app is self._app else app)(scope, receive, send)
        finally:
            if self._audit is not None and (access.audited or record_of(scope).controls):
                self._audit.write(record_of(scope), scope)

    def _admitted(self, scope: Scope, app: ASGIApp, role: Role) -> ASGIApp:
        """`app`, or the refusal of a request without a key that has this role."""
        sent = sent_keys(scope)
        try:
            key = self._key_of(scope, sent)
        except OverloadedError as error:
            return error_response(error)
        if key is None:
            return _unauthorized(scope, sent)
        record_of(scope).key = key
        return app if key.role.allows(role) else error_response(RoleError.needing(role, key.role))

    async def _changed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a control action, or refuses it if too many of the client's are under way."""
        client = client_of(scope)
        if self._changes[client] >= MAX_CHANGES:
            fault = OverloadedError(f"{MAX_CHANGES} control actions are under way already; wait for some to end.")
            await error_response(fault)(scope, receive, send)
            return
        self._changes[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._changes -= Counter((client,))

    def _key_of(self, scope: Scope, sent: set[bytes]) -> NamedKey | None:
        if not self._attempts.ring.required:
            return ANYONE
        if sent:
            return self._attempts.find(address_of(scope), *sent) if len(sent) == 1 else None
        headers = Headers(scope=scope)
        return self._sessions.key_of(headers) if from_own_page(scope, headers) else None


def needed(routes: Iterable[BaseRoute], scope: Scope) -> Access:
    """What a request needs of a key: that of the first route that matches it, which is the one that the router runs.

    Args:
        routes: all routes of the app's router, in its order.

    Raises:
        UnknownRouteError: there is no route for the path.
        MethodError: there are routes for the path, but none for the method.
    """
    others: dict[str, set[str]] = {}
    for route in routes:
        match, _ = route.matches(scope)
        path = getattr(route, "path", "")
        if match is Match.FULL:
            return route.access if isinstance(route, Endpoint) else UNDECLARED
        if match is Match.PARTIAL:
            others.setdefault(path, set()).update(getattr(route, "methods", None) or ())
    if not others or (scope["method"], scope["path"]) in ABSENT:
        raise UnknownRouteError("No such route.")
    # Those of a route of exactly this path, not of one whose parameter would take its last part for a name.
    raise MethodError(others.get(scope["path"]) or set().union(*others.values()))


def _unauthorized(scope: Scope, sent: set[bytes]) -> Response:
    """401, or for a browser that opens a page, the way to the login page."""
    path, headers = scope["path"], Headers(scope=scope)
    if path in PAGES and "text/html" in headers.get("accept", ""):
        return RedirectResponse(f"{LOGIN}?next={quote(path)}", status_code=303)
    if len(sent) > 1:
        return error_response(ApiKeyError("The headers have different API keys: send one, or the same one in all."))
    return error_response(ApiKeyError("Send the API key as `Authorization: Bearer <key>`; it is missing or wrong."))


def sent_keys(scope: Scope) -> set[bytes]:
    """The different keys in the headers, which need not be ASCII."""
    sent = [(name, bytes(value)) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    keys = (value.strip() if name == b"x-api-key" else _authorization(value) for name, value in sent)
    return {key for key in keys if key is not None}


def _authorization(value: bytes) -> bytes | None:
    """The key in an Authorization header, which may be empty; None if the header is of another scheme."""
    scheme, _, credentials = value.partition(b" ")
    if scheme.lower() == b"basic":
        return _password(credentials.strip())
    return credentials.strip() if scheme.lower() == b"bearer" else None


def _password(credentials: bytes) -> bytes:
    """The password of HTTP Basic credentials; empty if they are malformed."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""
