"""The spans of training, made of its events.

    chat tiny         the request that drew the trajectories of a group
    └─ score          from its end until the group has all its rewards

    update tone       one update, in a trace of its own, with links to the spans of the groups that it has taken

A group without a request of HTTP, such as one that the server samples by itself, has no trace.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Status, StatusCode, Tracer

from mlx_parallm.rl.status import TrainingEvent

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
