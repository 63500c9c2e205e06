"""The ASGI middlewares, in the order in which a request passes them:

    request log, HEAD and trailing slash, Host and Origin → CORS (Starlette's) → API key → routes

They are plain ASGI, so that a client's disconnect reaches the routes. Loopback is not a trust boundary: a web page can
call a server on localhost, directly (which the Origin header shows) or through DNS rebinding (which Host shows).
"""

from __future__ import annotations

import base64
import hmac
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.config import ServerConfig
from mlx_parallm.server.error_forms import form_of
from mlx_parallm.server.errors import ApiKeyError, ForbiddenOriginError, error_response, unexpected_response
from mlx_parallm.server.http import request_log
from mlx_parallm.server.http.request_log import IGNORED_FIELDS, LORA_ADAPTER, REQUEST_ID, RequestRecord
from mlx_parallm.server.metrics import ServerMetrics

OPEN_PATHS = frozenset({"/health", "/liveness", "/ready"})
"""Served without a key, because probes send none. Their answers reveal nothing but the status."""


def add_middlewares(app: FastAPI, config: ServerConfig, metrics: ServerMetrics) -> None:
    """Adds all middlewares. The one that is added last sees a request first."""
    if config.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=config.api_key.get_secret_value())
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED_FIELDS, LORA_ADAPTER],
        )
    app.add_middleware(EntryMiddleware, config=config, metrics=metrics)


class EntryMiddleware:
    """The first to see a request and the last to see its response.

    - Every response gets an id, is counted by its status and has a line in the request log.
    - HEAD is answered like GET, without the body. A path with a trailing slash is routed like the path without it. It
      is not redirected, because clients do not send a body again when they follow a redirect.
    - The answer is 403 unless the Host header is accepted, and every Origin header is accepted or names the same site.
    - Exceptions that no handler expected are answered here, and raised again for uvicorn to log.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = config.access_log
        self._hosts = frozenset(host.lower() for host in config.accepted_hosts)
        self._origins = frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope)
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

        fault = self._fault(Headers(scope=scope))
        app = self._app if fault is None else error_response(ForbiddenOriginError(fault))
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
        self._metrics.responses.labels(str(record.status)).inc()
        headers = MutableHeaders(scope=message)
        headers[REQUEST_ID] = record.request_id
        if (own_header := form_of(path).id_header) is not None:
            headers[own_header] = record.request_id
        if record.ignored.names:
            headers[IGNORED_FIELDS] = ", ".join(record.ignored.names)

    def _fault(self, headers: Headers) -> str | None:
        """Why the Host or an Origin is refused; None if they are accepted."""
        host = headers.get("host", "")
        try:
            parts = urlsplit(f"//{host}")
            name = "" if "@" in host or parts.path or parts.query else parts.hostname
        except ValueError:  # malformed
            name = ""
        if "*" not in self._hosts and name not in self._hosts:
            return "This server does not answer to that Host; the operator can allow it (allowed_hosts)."
        if not all(self._same_site(origin, host) for origin in headers.getlist("origin")):
            return "Requests from that Origin are not allowed; the operator can allow it (cors_origins)."
        return None

    def _same_site(self, origin: str, host: str) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        return origin.partition("://")[2].lower() == host.lower()


class ApiKeyMiddleware:
    """Answers 401 unless the header is `Authorization: Bearer <key>` or, as Tinker's SDK sends it, `X-API-Key: <key>`,
    or the path is one of `OPEN_PATHS`. Clients that can only put the key into a URL, such as
    http://any:KEY@localhost:8000, send it as the password of HTTP Basic. Keys are compared in constant time."""

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
        """Compares bytes, so a key or a header that is not ASCII is just a wrong key."""
        sent = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
        if len(sent) != 1:
            return False
        ((name, key),) = sent
        if name == b"x-api-key":
            return hmac.compare_digest(key.strip(), self._key)
        scheme, _, key = key.partition(b" ")
        if scheme.lower() == b"basic":
            return hmac.compare_digest(_password(key.strip()), self._key)
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def _password(credentials: bytes) -> bytes:
    """The password of HTTP Basic credentials; empty if they are malformed."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""
