"""The spans of requests, and those of training, which are made of its events.

    chat tiny               a request, from its arrival to the last byte of the answer
    ├─ queue                until the first forward unit that has a row of it
    ├─ prefill              until the first token
    ├─ decode               until the last token, of all sequences
    └─ score                if its answers are trajectories: until the group has all its rewards

    update tone             one update, in a trace of its own, with links to the spans of the groups that it has taken

The last part of a request that failed, or whose client left, ends with it. A group without a request of HTTP, such as
one that the server samples by itself, has no trace.

Names and attributes are those of OpenTelemetry's conventions for HTTP servers and for generative AI; the latencies have
the names that vLLM gives them. No attribute has text of a prompt or an answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_parallm.core.requests import GenerationRequest
from mlx_parallm.rl.status import TrainingEvent
from mlx_parallm.server.request_log import MAX_TEXT, PROBES, RequestRecord

# -- requests --------------------------------------------------------------------------------------

PROVIDER = "mlx_parallm"

_MAX_INT = 2**63 - 1  # of an attribute; seeds that the server draws may be larger
_TEXT_ROUTES = ("/completions", "/generate")


class RequestSpans:
    """Makes the spans of requests. Event loop's thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def of(self, scope: Scope, record: RequestRecord) -> Iterator[None]:
        """The block is the request. It continues the trace that the header `traceparent` names, if there is one, and
        its span is the current one, so that what is collected in it belongs to its trace. Probes have no span."""
        path: str = scope["path"]
        if path in PROBES:
            yield
            return
        started = time.time_ns() - round((time.monotonic() - record.arrived_at) * 1e9)
        parent = propagate.extract(dict(Headers(scope=scope)))
        span = self._tracer.start_span(
            f"{record.method} {path[:MAX_TEXT]}", parent, SpanKind.SERVER, start_time=started
        )
        found = span.get_span_context()
        if not found.is_valid:  # OTEL_SDK_DISABLED
            yield
            return
        record.trace_id, record.traceresponse = f"{found.trace_id:032x}", _header(found)
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield
        finally:
            context.detach(token)
            now = time.monotonic()
            if span.is_recording():
                self._describe(span, scope, record)
                self._add_parts(span, record, started, now)
            span.end(_at(now, record, started))

    def _describe(self, span: Span, scope: Scope, record: RequestRecord) -> None:
        route = getattr(scope.get("route"), "path", None)
        span.update_name(f"{record.method} {route}" if route else f"{record.method}")
        attributes = {
            "http.request.method": record.method,
            "url.scheme": scope["scheme"],
            "url.path": scope["path"][:MAX_TEXT],
            "http.route": route,
            "http.response.status_code": record.status,
            "error.type": record.error,
        }
        if (request := record.request) is not None:
            operation = _operation(request, route or "")
            span.update_name(f"{operation} {record.model}")
            attributes |= {"gen_ai.operation.name": operation, **_generation(record, request)}
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if record.error is not None and (record.status is None or record.status >= 500 or record.request is not None):
            span.set_status(Status(StatusCode.ERROR, record.error))

    def _add_parts(self, span: Span, record: RequestRecord, started: int, now: float) -> None:
        """Adds the spans of the parts that the request has begun. Each ends where the next one begins."""
        within = trace.set_span_in_context(span)
        begins = {"queue": record.queued_at, "prefill": record.started_at, "decode": record.first_token_at}
        begun = [(name, begin) for name, begin in begins.items() if begin is not None]
        last = now if record.finished is None else record.finished.finished_at
        ends = [*(begin for _, begin in begun[1:]), last]
        for (name, begin), end in zip(begun, ends, strict=False):
            self._tracer.start_span(name, within, start_time=_at(begin, record, started)).end(_at(end, record, started))


def _at(seconds: float, record: RequestRecord, started: int) -> int:
    """A time of the monotonic clock as Unix time, in nanoseconds. The request's arrival is `started`."""
    return started + round((seconds - record.arrived_at) * 1e9)


def _header(found: SpanContext) -> str:
    """The value of `traceresponse`, which has the form of `traceparent`."""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def _operation(request: GenerationRequest, route: str) -> str:
    if request.pooling is not None:
        return "embeddings"
    is_text = route.endswith(_TEXT_ROUTES) and not route.endswith("/chat/completions")
    return "text_completion" if is_text else "chat"


def _generation(record: RequestRecord, request: GenerationRequest) -> dict[str, AttributeValue | None]:
    sampling, finished = request.sampling, record.finished
    first_token_s = record.first_token_s
    return {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.max_tokens": request.stopping.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed if sampling.seed <= _MAX_INT else None,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.adapter or record.model,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons) or None,
        "gen_ai.response.time_to_first_chunk": first_token_s,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.request.id": record.engine_id,
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_to_first_token": first_token_s,
        "gen_ai.latency.e2e": None if finished is None else finished.finished_at - finished.arrived_at,
        "mlx_parallm.adapter": record.adapter,
        "mlx_parallm.finish": record.finish,
    }


# -- training --------------------------------------------------------------------------------------

MAX_GROUPS = 10_000
"""Groups whose traces are remembered; the oldest are forgotten first."""
MAX_LINKS = 128
"""Links of one update, and requests of one group. It is also OpenTelemetry's own limit."""

_METRICS = ("loss", "kl", "entropy", "grad_norm", "reward_mean")


@dataclass(slots=True)
class _Group:
    """A group that was collected in requests. `spans`: the newest span of each of them. `since`: in nanoseconds."""

    since: int
    spans: list[SpanContext] = field(default_factory=list)
    scored: bool = False


class TrainingSpans:
    """Makes the spans of scoring and of updates. Event loop's thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._updates: dict[str, Span] = {}  # that are being made, by adapter

    def on_event(self, event: TrainingEvent) -> None:
        """Takes an event. `collected` must come in the context of its request."""
        match event.kind:
            case "collected":
                self._collected(event)
            case "scored":
                self._scored(event)
            case "updating":
                self._begin_update(event)
            case "update" | "held" | "skipped":
                self._end_update(event)

    def close(self) -> None:
        """Ends the updates that were not finished."""
        for span in self._updates.values():
            span.end()
        self._updates.clear()

    def _collected(self, event: TrainingEvent) -> None:
        found = trace.get_current_span().get_span_context()
        if not found.is_valid:
            return
        group = self._groups.setdefault(event.data["group_id"], _Group(_ns(event)))
        if found not in group.spans and len(group.spans) < MAX_LINKS:
            group.spans.append(found)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def _scored(self, event: TrainingEvent) -> None:
        group = self._groups.get(event.data["group_id"])
        if group is None or group.scored or not event.data.get("complete"):
            return
        group.scored = True
        group.spans = [self._score(each, group.since, event) for each in group.spans]

    def _score(self, request: SpanContext, since: int, event: TrainingEvent) -> SpanContext:
        data = event.data
        rewards = [reward for reward in data.get("rewards", ()) if reward is not None]
        mean = {"mlx_parallm.reward_mean": sum(rewards) / len(rewards)} if rewards else {}
        span = self._tracer.start_span(
            "score",
            trace.set_span_in_context(NonRecordingSpan(request), Context()),
            attributes={"mlx_parallm.adapter": data["adapter"], "mlx_parallm.group_id": data["group_id"], **mean},
            start_time=since,
        )
        span.end(_ns(event))
        return span.get_span_context()

    def _begin_update(self, event: TrainingEvent) -> None:
        adapter: str = event.data["adapter"]
        if (unfinished := self._updates.pop(adapter, None)) is not None:
            unfinished.end(_ns(event))
        groups = [self._groups.pop(group_id, None) for group_id in event.data["groups"]]
        found = [span for group in groups if group is not None for span in group.spans]
        self._updates[adapter] = self._tracer.start_span(
            f"update {adapter}",
            Context(),  # a trace of its own, also if a request has asked for it
            attributes={"mlx_parallm.adapter": adapter, "mlx_parallm.trajectories": event.data["trajectories"]},
            links=[Link(span) for span in found[:MAX_LINKS]],
            start_time=_ns(event),
        )

    def _end_update(self, event: TrainingEvent) -> None:
        data = event.data
        if (span := self._updates.pop(data["adapter"], None)) is None:
            return
        figures = {f"mlx_parallm.{name}": data["metrics"][name] for name in _METRICS if name in data["metrics"]}
        named = {"status": data["status"], "version": data["version"] or "", "step": data["step"]}
        span.set_attributes({f"mlx_parallm.{name}": value for name, value in named.items()} | figures)
        if data["reason"]:
            span.set_status(Status(StatusCode.ERROR, data["reason"]))
        span.end(_ns(event))


def _ns(event: TrainingEvent) -> int:
    return round(event.at * 1e9)
