"""The ASGI middlewares, in the order in which a request passes them:

    EntryMiddleware: request log, HEAD and trailing slash, Host and Origin → CORS (Starlette's) → Guard: key and role
        → routes

They are plain ASGI, so that a client's disconnect reaches the routes. Loopback is not a trust boundary: a web page can
call a server on localhost, directly (which the Origin header shows) or through DNS rebinding (which Host shows).
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from mlx_parallm.atomic import append_lines
from mlx_parallm.config import ServerConfig
from mlx_parallm.errors import ConfigError, OverloadedError, RequestError, RoleError
from mlx_parallm.logs import log_context
from mlx_parallm.server import request_log
from mlx_parallm.server.access import (
    ANYONE,
    LOGIN,
    PAGES,
    UNDECLARED,
    Access,
    KeyRing,
    NamedKey,
    Role,
    Sessions,
    from_other_site,
    from_own_page,
)
from mlx_parallm.server.errors import (
    ApiKeyError,
    ForbiddenOriginError,
    FramingError,
    HeadersTooLargeError,
    MalformedPathError,
    MethodError,
    UnknownRouteError,
    error_response,
    form_of,
    unexpected_response,
)
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.request_log import (
    CLIENT_LEFT,
    IGNORED_FIELDS,
    LORA_ADAPTER,
    MAX_TEXT,
    REQUEST_ID,
    TRACE_RESPONSE,
    RequestRecord,
    address_of,
    client_of,
    record_of,
)
from mlx_parallm.server.routing import Endpoint
from mlx_parallm.server.services import Services

if TYPE_CHECKING:
    from mlx_parallm.server.traces import Traces

_log = logging.getLogger(__name__)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,31}://[A-Za-z0-9\[][A-Za-z0-9._:\]-]{0,252}", re.ASCII)


def add_middlewares(app: FastAPI, services: Services, traces: Traces | None = None) -> None:
    """Adds all middlewares. The one that is added last sees a request first. Call it when `app` has all its routes.

    `traces`: None if requests are not traced."""
    config = services.config
    audit = None if config.audit_log is None else AuditLog(config.audit_log)
    app.add_middleware(Guard, ring=services.ring, sessions=services.sessions, routes=app.router.routes, audit=audit)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED_FIELDS, LORA_ADAPTER, TRACE_RESPONSE],
        )
    app.add_middleware(EntryMiddleware, config=config, metrics=services.metrics, traces=traces)


MAX_HEADER_BYTES = 64 * 1024


class EntryMiddleware:
    """The first to see a request and the last to see its response.

    - Every response gets an id, is counted by its status and has a line in the request log, and a trace if requests are
      traced.
    - HEAD is answered like GET, without the body. A path with a trailing slash is routed like the path without it. It
      is not redirected, because clients do not send a body again when they follow a redirect.
    - A path with control characters is answered with 400: a newline at its end would be no part of it for the router.
    - The answer is 403 unless the Host header is accepted, and every Origin header is accepted or names this server.
      Pages of other sites may send no Origin, as for an image; they may only open the pages for people.
    - A request with Content-Length and Transfer-Encoding is answered with 400.
    - One with very large headers is answered with 431, or with 400 by h11 if they come in pieces.
    - Exceptions that no handler expected are answered here, and raised again for uvicorn to log.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, metrics: ServerMetrics, traces: Traces | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces
        self._access_log = config.access_log
        self._hosts = frozenset(host.lower() for host in config.accepted_hosts)
        self._origins = frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope)
        log_context.set(record.log_fields)  # for what is logged in this task, also by uvicorn after this call
        with nullcontext() if self._traces is None else self._traces.requests.of(scope, record):
            await self._answer(record, scope, receive, send)

    async def _answer(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["method"] == "HEAD"
        # Changed in place: the router puts the matched route, which the log needs, into this scope.
        scope["method"] = "GET" if is_head else scope["method"]
        scope["path"] = scope["path"].removesuffix("/") or "/"

        async def send_answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._start_response(record, scope["path"], message)
                await send(message)
                if is_head:  # a stream sees that as a client's disconnect
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not is_head:
                await send(message)

        fault = self._fault(scope)
        app = self._app if fault is None else error_response(fault)
        try:
            await app(scope, receive, send_answer)
        except Exception as error:
            record.error = "internal_error"
            if record.status is None:
                await unexpected_response(error)(scope, receive, send_answer)
            raise
        finally:
            self._metrics.ignored_fields.inc(record.ignored.count)
            if self._access_log:
                request_log.write(record, getattr(scope.get("route"), "path", None))

    def _start_response(self, record: RequestRecord, path: str, message: Message) -> None:
        record.status = message["status"]
        self._metrics.observe_response(record.status)
        headers = MutableHeaders(scope=message)
        headers[REQUEST_ID] = record.request_id
        if (own_header := form_of(path).id_header) is not None:
            headers[own_header] = record.request_id
        if record.traceresponse is not None:
            headers[TRACE_RESPONSE] = record.traceresponse
        if record.account is not None:
            headers.update(record.account.headers())
        if record.ignored.names:
            headers[IGNORED_FIELDS] = ", ".join(record.ignored.names)

    def _fault(self, scope: Scope) -> RequestError | None:
        """Why the path, the Host or an Origin is refused; None if they are accepted."""
        if _CONTROL.search(scope["path"]):
            return MalformedPathError("The path has control characters, such as %0A; send it without them.")
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:  # RFC 9112, section 6.1: request smuggling
            return FramingError("Transfer-Encoding and Content-Length contradict each other; send one of them.")
        if sum(len(name) + len(value) + 4 for name, value in headers.raw) > MAX_HEADER_BYTES:
            return HeadersTooLargeError(f"The headers are larger than {MAX_HEADER_BYTES >> 10} KiB.")
        host = headers.get("host", "")
        try:
            parts = urlsplit(f"//{host}")
            name = "" if "@" in host or parts.path or parts.query else parts.hostname
        except ValueError:  # malformed
            name = ""
        if "*" not in self._hosts and name not in self._hosts:
            return ForbiddenOriginError(
                f"This server does not answer to that Host; its operator can allow it with {host_flag(name)}."
            )
        for origin in headers.getlist("origin"):
            if not self._accepts(origin, scope["scheme"], host):
                return ForbiddenOriginError(
                    "This server takes no requests from that Origin; its operator can allow it with "
                    f"{origin_flag(origin)}."
                )
        if "origin" not in headers and scope["path"] not in (*PAGES, LOGIN) and from_other_site(headers):
            return ForbiddenOriginError("This server takes no such requests from pages of other sites.")
        return None

    def _accepts(self, origin: str, scheme: str, host: str) -> bool:
        return bool(self._origins & {origin, "*"}) or origin.lower() == f"{scheme}://{host}".lower()


def host_flag(name: str | None) -> str:
    """The flag that allows this Host. A name that cannot be one is not repeated, because people copy the flag into a
    shell."""
    return f"--allowed-hosts {name if name and _HOST.fullmatch(name) else 'NAME'}"


def origin_flag(origin: str) -> str:
    """The flag that allows this Origin, with the same care."""
    return f"--cors-origins {origin if _ORIGIN.fullmatch(origin) else 'ORIGIN'}"


# -- keys and roles --------------------------------------------------------------------------------

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
        ring: KeyRing,
        sessions: Sessions,
        routes: Sequence[BaseRoute],
        audit: AuditLog | None = None,
    ) -> None:
        self._app = app
        self._ring = ring
        self._sessions = sessions
        self._routes = routes
        self._audit = audit
        self._changes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no route takes WebSockets
            await (WebSocketClose() if scope["type"] == "websocket" else self._app)(scope, receive, send)
            return
        try:
            access, app = access_of(self._routes, scope), self._app
        except (UnknownRouteError, MethodError) as error:
            access, app = Access(Role.INFERENCE), error_response(error)
        try:
            app = app if access.role is None else self._admitted(scope, app, access.role)
            await (self._changed if access.audited and app is self._app else app)(scope, receive, send)
        finally:
            if self._audit is not None and (access.audited or record_of(scope).controls):
                await self._audit.write(record_of(scope), scope)

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
        if not self._ring.required:
            return ANYONE
        if sent:
            return self._ring.find(next(iter(sent)), address_of(scope)) if len(sent) == 1 else None
        headers = Headers(scope=scope)
        return self._sessions.key_of(headers) if from_own_page(scope, headers) else None


def access_of(routes: Iterable[BaseRoute], scope: Scope) -> Access:
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


# -- the audit log ---------------------------------------------------------------------------------


class AuditLog:
    """One line of JSON for each control action, such as loading an adapter or pausing the server: who asked for
    what, when, and what came of it. It has no text of prompts or answers, because it has nothing of a request's body.

    Appends to a file that only its owner can read. A file that was moved away is made again, so that programs that
    rotate logs may move it. No other request waits for a slow disk.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            append_lines(file, b"", mode=0o600)
        except OSError as error:
            raise ConfigError(f"audit_log: {file} cannot be written: {error.strerror}") from error
        self._file = file
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="audit-log")

    async def write(self, record: RequestRecord, scope: Scope) -> None:
        """Adds the line of a request that has ended. If the disk fails, the line is in the server's own log instead,
        and the request is answered all the same."""
        line = json.dumps(_line(record, scope), separators=(",", ":"))
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._worker, self._append, line))

    def _append(self, line: str) -> None:
        try:
            append_lines(self._file, f"{line}\n".encode(), mode=0o600)
        except OSError as error:
            _log.error("the audit log cannot be written (%s): %s", error.strerror, line)


def _line(record: RequestRecord, scope: Scope) -> dict[str, object]:
    query = scope.get("query_string", b"").decode("ascii", "replace")
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "key": None if record.key is None else record.key.name,
        "client": address_of(scope) or None,
        "method": record.method,
        "path": (record.path or "")[:MAX_TEXT],
        "query": query[:MAX_TEXT],
        "status": record.status or CLIENT_LEFT,
        "error": record.error,
        "id": record.request_id,
    }
