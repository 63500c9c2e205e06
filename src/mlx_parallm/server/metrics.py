"""Prometheus metrics, `mlx_parallm_*`: vLLM's names and meanings where vLLM has them.

Counts and latencies are observed here, from events; the engine's gauges and counters are read from
`EngineClient.stats()` when somebody scrapes (those of its schedule by `schedule_metrics`), and so are the adapters'
(`adapter_metrics`) and training's (`training_metrics`). The registry is the app's own, not the process's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.core import (
    AdapterClient,
    EngineClient,
    EngineStats,
    Event,
    GenerationRequest,
    RequestFinished,
    SequenceOutput,
    TrainingClient,
)
from mlx_parallm.errors import AbortedError
from mlx_parallm.server.adapter_metrics import PREFIX, AdapterMetrics, Tally
from mlx_parallm.server.limits import SequenceGate
from mlx_parallm.server.schedule_metrics import schedule_metrics
from mlx_parallm.server.training_metrics import TrainingMetrics

REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.75, 1.5, 3.0, 10.0)

GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Sequences that hold a row.", lambda stats: stats.running),
    "num_requests_waiting": ("Sequences that wait for a row.", lambda stats: stats.waiting),
    "kv_cache_usage_perc": (
        "Held share of the KV pool's budget, 0 to 1.",
        lambda stats: stats.kv_bytes_held / stats.kv_bytes_budget if stats.kv_bytes_budget else 0.0,
    ),
    "kv_cache_bytes_held": ("Bytes of the KV pool in use.", lambda stats: stats.kv_bytes_held),
    "kv_cache_tokens": ("Tokens in the KV pool.", lambda stats: stats.kv_tokens_used),
    "engine_paused": ("1 since POST /pause, until POST /resume.", lambda stats: stats.paused),
    "engine_alive": ("1 while the device thread runs.", lambda stats: stats.alive),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_preemptions": (
        "Rows recomputed: for want of KV memory, or after a failed unit.",
        lambda stats: stats.preemptions_total,
    ),
    "prompt_tokens": ("Prompt tokens processed.", lambda stats: stats.prompt_tokens_total),
    "generation_tokens": ("Tokens generated.", lambda stats: stats.generation_tokens_total),
    "engine_steps": ("Decode steps launched.", lambda stats: stats.steps_total),
    "engine_failed_steps": (
        "Prefill units and decode steps that raised.",
        lambda stats: stats.failed_steps_total,
    ),
    "engine_aborted": ("Requests aborted before their end.", lambda stats: stats.aborted_total),
}


class ServerMetrics:
    """Every metric of one app."""

    def __init__(
        self, engine: EngineClient, adapters: AdapterClient, training: TrainingClient, gate: SequenceGate
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self.adapters = AdapterMetrics(adapters)
        self.registry.register(self.adapters)
        self.registry.register(TrainingMetrics(training))
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", REQUEST_BUCKETS_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S)
        self.queued = self._histogram("request_queue_time_seconds", "Arrival to first prefill.", REQUEST_BUCKETS_S)
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", TOKEN_BUCKETS_S
        )
        self.finished = self._counter(
            "request_success", "Sequences ended: stop, length, abort or error.", ("finished_reason",)
        )
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens of finished requests.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Those of them taken from a prefix cache.")
        self.client_disconnects = self._counter("client_disconnects", "Requests whose client left before the end.")
        self.responses = self._counter("http_responses", "HTTP responses by status.", ("status",))
        self.ignored_fields = self._counter("ignored_fields", "Unknown fields of request bodies that were ignored.")
        held = Gauge(PREFIX + "queue_sequences_held", "Sequences inside the bounded queue.", registry=self.registry)
        held.set_function(lambda: gate.held)
        limit = Gauge(PREFIX + "queue_sequences_limit", "Places in the bounded queue.", registry=self.registry)
        limit.set(gate.limit)

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self.registry)


class _EngineCollector(Collector):
    """Reads the engine once per scrape, so that its numbers belong together."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, (about, read) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, about, value=float(read(stats)))
        for name, (about, read) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, about, value=float(read(stats)))
        yield from schedule_metrics(stats)


class RequestObserver:
    """Watches one request's events; sequences that have not ended when the block is left were aborted or failed."""

    def __init__(self, metrics: ServerMetrics, request: GenerationRequest) -> None:
        self._metrics = metrics
        self._adapter = request.adapter
        self._unfinished = request.sequences
        self._last_token_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._tally.requests += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit, AbortedError))
        self._metrics.finished.labels("abort" if left else "error").inc(self._unfinished)

    @property
    def _tally(self) -> Tally:
        return self._metrics.adapters.tally(self._adapter)

    def see(self, event: Event) -> None:
        if isinstance(event, SequenceOutput):
            self._see_output(event)
        elif isinstance(event, RequestFinished):
            self._see_end(event)

    def _see_output(self, output: SequenceOutput) -> None:
        if output.token_ids:
            now = time.monotonic()
            if (before := self._last_token_at.get(output.index)) is not None:
                self._metrics.inter_token.observe((now - before) / len(output.token_ids))
            self._last_token_at[output.index] = now
            self._tally.generation_tokens += len(output.token_ids)
        if output.finish_reason:
            self._unfinished -= 1
            self._metrics.finished.labels(output.finish_reason.value).inc()

    def _see_end(self, end: RequestFinished) -> None:
        self._metrics.e2e.observe(end.finished_at - end.arrived_at)
        tally = self._tally
        tally.finished += 1
        tally.latency_s += end.finished_at - end.arrived_at
        tally.prompt_tokens += end.prompt_tokens
        self._metrics.queued.observe(end.started_at - end.arrived_at)
        if end.completion_tokens:
            self._metrics.ttft.observe(end.first_token_at - end.arrived_at)
        self._metrics.prefix_queries.inc(end.prompt_tokens)
        self._metrics.prefix_hits.inc(end.cached_tokens)
