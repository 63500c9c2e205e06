"""The request log: a record of each HTTP request, and the line of JSON that is written when the request ends.

The line is the same in both formats of the log; among lines of JSON, it also has what each of them has.

A line never contains text of a prompt or an answer. Names, ids and paths that a client sent are escaped and
shortened.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import Event, GenerationRequest, RequestFinished, RequestStarted, SequenceOutput
from mlx_parallm.logs import StructuredMessage, timestamp
from mlx_parallm.server.access import ANYONE, API_KEY, NamedKey
from mlx_parallm.server.api.fields import CHOSEN_ID, IgnoredFields

if TYPE_CHECKING:
    from mlx_parallm.server.limits import Account

REQUEST_ID, IGNORED_FIELDS, LORA_ADAPTER = "x-request-id", "x-ignored-fields", "x-lora-adapter"
"""Response headers. A client may send the first one too."""
TRACE_RESPONSE = "traceresponse"
"""The response header with the ids of the request's trace and span, in the form of the request header `traceparent`."""

CLIENT_LEFT = 499
"""The status in the log if the client disconnected before the response began; nginx uses the same number."""
PROBES = frozenset({"/health", "/liveness", "/ready", "/metrics", "/v1/stats"})
"""Routes that monitoring and the dashboard call every few seconds. They are logged at level debug unless they fail."""
MAX_TEXT = 200

log = logging.getLogger("mlx_parallm.access")


def write_plain_lines() -> None:
    """Writes the log's lines to stderr without a prefix, so that each is JSON from its first character also if the rest
    of the log is text."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    log.propagate = False


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request that the log and the response headers show.

    `request_id` is the value of the response's x-request-id header. If `id_from_client`, the client chose it, and two
    requests may have the same; `engine_id` is unique. Times are `time.monotonic`: of the arrival, and when the request
    came into the engine's queue, left it, and got its first token. None means that it did not get that far. `key`: the
    key that it was let in with; None before that, and for paths that need none. `controls`: it is a control action,
    though its route is not one of those. `waits`: it only waits for what others do, and computes nothing, so it may be
    cut off when too many connections are open. `account`: that of the key, for requests for answers. `finished`: the
    last event of a request that was answered to its end. `trace_id` and `traceresponse`: those of its trace; None if
    there is none.
    """

    request_id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    id_from_client: bool = False
    method: str | None = None
    path: str | None = None
    key: NamedKey | None = None
    account: Account | None = None
    controls: bool = False
    waits: bool = False
    arrived_at: float = field(default_factory=time.monotonic)
    status: int | None = None
    error: str | None = None
    disconnected: bool = False
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    generates: bool = False
    trace_id: str | None = None
    traceresponse: str | None = None
    engine_id: str | None = None
    request: GenerationRequest | None = None
    model: str | None = None
    adapter: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued_at: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    finished: RequestFinished | None = None
    finish_reasons: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, scope: Scope) -> RequestRecord:
        """Makes the record of a request that has just arrived and keeps it in `scope` for `record_of`."""
        record = cls(method=scope["method"], path=scope["path"])
        sent = Headers(scope=scope).get(REQUEST_ID, "")
        if CHOSEN_ID.fullmatch(sent):  # any other id is replaced
            record.request_id, record.id_from_client = sent, True
        scope.setdefault("state", {})["record"] = record
        return record

    def set_model(self, model: str) -> None:
        """Marks the request as a generation by the model or adapter of that name."""
        self.generates = True
        self.model = model

    def set_request(self, request: GenerationRequest, chosen_id: str | None = None) -> None:
        """Notes the engine's request. Its id becomes the response's, unless the client chose one by a header or, with
        `chosen_id`, in the body."""
        self.request, self.engine_id = request, request.request_id
        self.queued_at = time.monotonic()
        if not self.id_from_client:
            self.request_id, self.id_from_client = chosen_id or request.request_id, chosen_id is not None
        self.adapter = None if request.adapter == BASE_ADAPTER else str(request.adapter)
        self.prompt_tokens = sum(map(len, request.prompts))

    @property
    def adapter_header(self) -> dict[str, str]:
        """The response header that names the adapter version; none for the base model."""
        return {} if self.adapter is None else {LORA_ADAPTER: self.adapter}

    def observe(self, event: Event) -> None:
        """Notes one event of the engine."""
        if isinstance(event, RequestStarted):
            self.queued_at, self.started_at = event.arrived_at, event.started_at
        elif isinstance(event, SequenceOutput):
            self.completion_tokens += len(event.token_ids)
            if event.token_ids and self.first_token_at is None:
                self.first_token_at = time.monotonic()
            if event.finish_reason and event.finish_reason.value not in self.finish_reasons:
                self.finish_reasons.append(event.finish_reason.value)
        elif isinstance(event, RequestFinished):
            self.finished, self.cached_tokens = event, event.cached_tokens
            self.queued_at, self.started_at = event.arrived_at, event.started_at
            self.first_token_at = event.first_token_at if event.completion_tokens else None

    @property
    def queue_s(self) -> float | None:
        """Seconds in the engine's queue."""
        return self._since_queued(self.started_at)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the arrival in the engine's queue to the first token."""
        return self._since_queued(self.first_token_at)

    def _since_queued(self, at: float | None) -> float | None:
        return None if at is None or self.queued_at is None else at - self.queued_at

    def log_fields(self) -> dict[str, str]:
        """The fields of other lines of the log that belong to this request; see `logs.log_context`."""
        fields = {"request_id": self.request_id, "trace_id": self.trace_id, "adapter": self.adapter}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def finish(self) -> str | None:
        """How the generation ended, for all sequences together; None if nothing was generated."""
        if self.disconnected:
            return "disconnect"
        if self.error and self.engine_id:
            return "error"
        return ",".join(self.finish_reasons) or None


def record_of(scope: Scope) -> RequestRecord:
    """The record that `RequestRecord.begin` put into `scope`."""
    return cast(RequestRecord, scope["state"]["record"])


def waits(scope: Scope) -> bool:
    """Whether the request only waits for what others do; see `RequestRecord`. It may not have a record yet."""
    record: RequestRecord | None = scope.get("state", {}).get("record")
    return record is not None and record.waits


def address_of(scope: Scope) -> str:
    """The client's address."""
    client = scope.get("client")
    return client[0] if client else ""


def client_of(scope: Scope) -> str:
    """Identifies the client whose limits a request counts for: by its key or, where it has none of its own, by its
    address."""
    record: RequestRecord | None = scope.get("state", {}).get("record")
    if record is None or record.key is None or record.key.name in (ANYONE.name, API_KEY):
        return f"address {address_of(scope)}"
    return f"key {record.key.name}"


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def write(record: RequestRecord, route: str | None) -> None:
    """Logs a request that has ended; `route` is the route's path pattern, None if no route matched."""
    succeeded = record.status is not None and record.status < 400
    level = logging.DEBUG if route in PROBES and succeeded else logging.INFO
    if log.isEnabledFor(level):
        line = _line(record, route)
        summary = " ".join(str(line[name]) for name in ("method", "route", "status") if line[name] is not None)
        log.log(level, StructuredMessage(summary, line))


def _line(record: RequestRecord, route: str | None) -> dict[str, Any]:
    line: dict[str, Any] = {
        "time": timestamp(time.time()),
        "request_id": record.request_id,
        "method": _cut(record.method),
        "route": route or _cut(record.path),
        "status": record.status or CLIENT_LEFT,
        **({} if record.key in (None, ANYONE) else {"key": record.key.name}),
        "total_ms": _ms(time.monotonic() - record.arrived_at),
    }
    if record.generates:
        line |= {
            "model": _cut(record.model),
            "adapter": record.adapter,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "queue_ms": _ms(record.queue_s),
            "first_token_ms": _ms(record.first_token_s),
            "finish": record.finish,
        }
    only_if_set = {
        "error": record.error,
        "trace_id": record.trace_id,
        "engine_id": None if record.engine_id == record.request_id else record.engine_id,
        "ignored": record.ignored.names,
        "did_you_mean": record.ignored.meant,
    }
    return line | {name: value for name, value in only_if_set.items() if value}


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:MAX_TEXT]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
