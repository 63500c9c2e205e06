"""The ASGI middlewares, in the order in which a request passes them:

    request log, HEAD and trailing slash, Host and Origin → CORS (Starlette's) → key and role → routes

They are plain ASGI, so that a client's disconnect reaches the routes. Loopback is not a trust boundary: a web page can
call a server on localhost, directly (which the Origin header shows) or through DNS rebinding (which Host shows).
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.config import ServerConfig
from mlx_parallm.errors import RequestError
from mlx_parallm.logs import log_context
from mlx_parallm.server.access.audit import AuditLog
from mlx_parallm.server.access.guard import Guard
from mlx_parallm.server.access.sessions import LOGIN, PAGES, from_other_site
from mlx_parallm.server.error_forms import form_of
from mlx_parallm.server.errors import (
    ForbiddenOriginError,
    FramingError,
    MalformedPathError,
    error_response,
    unexpected_response,
)
from mlx_parallm.server.http import request_log
from mlx_parallm.server.http.request_log import IGNORED_FIELDS, LORA_ADAPTER, REQUEST_ID, TRACE_RESPONSE, RequestRecord
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.services import Services

if TYPE_CHECKING:
    from mlx_parallm.server.traces.export import Traces

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,31}://[A-Za-z0-9\[][A-Za-z0-9._:\]-]{0,252}", re.ASCII)


def add_middlewares(app: FastAPI, services: Services, traces: Traces | None = None) -> None:
    """Adds all middlewares. The one that is added last sees a request first. Call it when `app` has all its routes.

    `traces`: None if requests are not traced."""
    config = services.config
    audit = None if config.audit_log is None else AuditLog(config.audit_log)
    app.add_middleware(
        Guard, attempts=services.attempts, sessions=services.sessions, routes=app.router.routes, audit=audit
    )
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED_FIELDS, LORA_ADAPTER, TRACE_RESPONSE],
        )
    app.add_middleware(EntryMiddleware, config=config, metrics=services.metrics, traces=traces)


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
        with nullcontext() if self._traces is None else self._traces.request(scope, record):
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
