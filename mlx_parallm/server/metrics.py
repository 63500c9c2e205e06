"""Prometheus metrics that the HTTP server counts itself, all named `mlx_parallm_*`: requests, latencies and responses.

Where vLLM has the same metric, the name after the prefix and the meaning are vLLM's. `metrics_collectors` has the
metrics that are read from the engine, the adapters and training on each scrape. The registry belongs to the app, not to
the process.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mlx_parallm.core import (
    AdapterClient,
    EngineClient,
    Event,
    FinishReason,
    RequestFinished,
    SequenceOutput,
    SequencePooled,
    TrainingClient,
)
from mlx_parallm.errors import AbortedError
from mlx_parallm.server.access.accounts import Account, Accounts
from mlx_parallm.server.lifecycle import SequenceGate
from mlx_parallm.server.metrics_collectors import (
    PREFIX,
    AdapterCollector,
    EngineCollector,
    ServedCounts,
    TrainingCollector,
)
from mlx_parallm.server.metrics_comparisons import ComparisonCollector
from mlx_parallm.server.metrics_keys import KeyCollector

REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.75, 1.5, 3.0, 10.0)


class ServerMetrics:
    """All metrics of one app."""

    def __init__(
        self,
        engine: EngineClient,
        adapters: AdapterClient,
        training: TrainingClient | None,
        gate: SequenceGate,
        accounts: Accounts,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.adapters = AdapterCollector(adapters)
        self.registry.register(self.adapters)
        self.registry.register(TrainingCollector(training))
        self.registry.register(ComparisonCollector(training))
        self.registry.register(KeyCollector(accounts))
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to first token.", REQUEST_BUCKETS_S
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Time from arrival to last token.", REQUEST_BUCKETS_S)
        self.queued = self._histogram(
            "request_queue_time_seconds", "Time from arrival to first prefill.", REQUEST_BUCKETS_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", TOKEN_BUCKETS_S
        )
        self.finished = self._counter(
            "request_success", "Sequences ended: stop, length, abort or error.", ("finished_reason",)
        )
        self.client_disconnects = self._counter("client_disconnects", "Requests whose client left before the end.")
        self.responses = self._counter("http_responses", "HTTP responses by status.", ("status",))
        self.ignored_fields = self._counter("ignored_fields", "Unknown fields of request bodies that were ignored.")
        held = Gauge(PREFIX + "queue_sequences_held", "Sequences inside the bounded queue.", registry=self.registry)
        held.set_function(lambda: gate.held)
        limit = Gauge(PREFIX + "queue_sequences_limit", "Places in the bounded queue.", registry=self.registry)
        limit.set(gate.limit)

    def exposition(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self.registry)


@dataclass(slots=True)
class RequestObserver:
    """Counts one request from its events, in a `with` block. Sequences that have not finished when the block ends count
    as aborted or failed.

    `served` are the counts of the request's adapter version, and `account` those of its key. `unfinished` is the number
    of its sequences that have not finished; at first, none has. `last_token_at` has the time (`time.monotonic`) of each
    sequence's last token.
    """

    metrics: ServerMetrics
    served: ServedCounts
    account: Account
    unfinished: int
    last_token_at: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.served.requests += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        aborted = kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit, AbortedError))
        self.metrics.finished.labels("abort" if aborted else "error").inc(self.unfinished)

    def observe(self, event: Event) -> None:
        if isinstance(event, SequenceOutput):
            self._observe_output(event)
        elif isinstance(event, SequencePooled):
            self._count_end(FinishReason.STOP)
        elif isinstance(event, RequestFinished):
            self._observe_end(event)

    def _observe_output(self, output: SequenceOutput) -> None:
        if output.token_ids:
            now = time.monotonic()
            if (before := self.last_token_at.get(output.index)) is not None:
                self.metrics.inter_token.observe((now - before) / len(output.token_ids))
            self.last_token_at[output.index] = now
            self.served.generation_tokens += len(output.token_ids)
            self.account.add_completion(len(output.token_ids))
        if output.finish_reason:
            self._count_end(output.finish_reason)

    def _count_end(self, reason: FinishReason) -> None:
        self.unfinished -= 1
        self.metrics.finished.labels(reason.value).inc()

    def _observe_end(self, end: RequestFinished) -> None:
        self.served.finished += 1
        self.served.latency_s += end.finished_at - end.arrived_at
        self.served.prompt_tokens += end.prompt_tokens
        self.account.cached_tokens += end.cached_tokens
        self.metrics.e2e.observe(end.finished_at - end.arrived_at)
        self.metrics.queued.observe(end.started_at - end.arrived_at)
        if end.completion_tokens:
            self.metrics.ttft.observe(end.first_token_at - end.arrived_at)
