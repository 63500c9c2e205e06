"""Prometheus metrics that the HTTP server counts itself, all named `mlx_parallm_*`: requests, latencies and responses;
those of the keys, of which there are at most as many series as there are keys; and the part that a key which is limited
to some adapters sees: the metrics of these adapters, and its own.

Where vLLM has the same metric, the name after the prefix and the meaning are vLLM's, and `metrics_vllm` exports it
under that name too. `metrics_collectors` and its like have the metrics that are read from the engine, the adapters and
training on each scrape. The registry belongs to the app, not to the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from mlx_parallm.core.adapters import AdapterClient
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.requests import Event, FinishReason, RequestFinished, SequenceOutput, SequencePooled
from mlx_parallm.core.text import RepairKind
from mlx_parallm.errors import AbortedError
from mlx_parallm.server.access.accounts import Account, Accounts
from mlx_parallm.server.access.keys import NamedKey
from mlx_parallm.server.cluster.parts import ClusterParts
from mlx_parallm.server.lifecycle import SequenceGate
from mlx_parallm.server.metrics_cluster import ClusterCollector
from mlx_parallm.server.metrics_collectors import MODEL_LABEL, PREFIX, AdapterCollector, EngineCollector, ServedCounts
from mlx_parallm.server.metrics_training import TrainingCollector
from mlx_parallm.server.metrics_vllm import VLLMNamesRegistry
from mlx_parallm.server.recent import Counted, RecentValues

if TYPE_CHECKING:
    from mlx_parallm.rl.competition.service import CompetitionService
    from mlx_parallm.rl.service import TrainingService

_LISTS = ("running_lora_adapters", "waiting_lora_adapters")
"""Labels whose values are names of adapters, with commas between them."""


class SeenMetrics(Collector):
    """The samples of a registry without those of other adapters and other keys."""

    def __init__(self, registry: CollectorRegistry, key: NamedKey) -> None:
        self._all, self._key = registry, key

    def collect(self) -> Iterator[Metric]:
        for metric in self._all.collect():
            seen = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            seen.samples = [self._seen(sample) for sample in metric.samples if self._shows(sample)]
            yield seen

    def _shows(self, sample: Sample) -> bool:
        adapter, key = sample.labels.get("adapter"), sample.labels.get("key")
        return (adapter is None or self._key.sees(adapter)) and key in (None, self._key.name)

    def _seen(self, sample: Sample) -> Sample:
        lists = {name: sample.labels[name].split(",") for name in _LISTS if name in sample.labels}
        seen = {name: ",".join(filter(self._key.sees, names)) for name, names in lists.items()}
        return sample._replace(labels={**sample.labels, **seen})


KEY_COUNTERS: Mapping[str, tuple[str, Callable[[Account], int]]] = {
    "key_requests": ("Requests for answers that began, by key.", lambda account: account.requests),
    "key_requests_refused": ("Requests that a limit of their key refused.", lambda account: account.refused),
    "key_prompt_tokens": ("Tokens of prompts, by key.", lambda account: account.prompt_tokens),
    "key_generation_tokens": ("Tokens generated, by key.", lambda account: account.completion_tokens),
}


class KeyCollector(Collector):
    """The usage of each key. Used on the event loop's thread only."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        accounts = self._accounts.all()
        running = GaugeMetricFamily(PREFIX + "key_requests_running", "Requests under way, by key.", labels=["key"])
        for account in accounts:
            running.add_metric([account.key.name], account.running)
        yield running
        for name, (about, read) in KEY_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, about, labels=["key"])
            for account in accounts:
                counter.add_metric([account.key.name], read(account))
            yield counter


REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.75, 1.5, 3.0, 10.0)


class ServerMetrics:
    """All metrics of one app, and the latencies of the last minute, which `/v1/stats` shows. `model_names`: those of
    the base models, the first one first. `cluster`: None if this server is not a node of one."""

    def __init__(
        self,
        engine: EngineClient,
        adapters: AdapterClient,
        training: TrainingService | None,
        gate: SequenceGate,
        accounts: Accounts,
        model_names: Sequence[str],
        cluster: ClusterParts | None = None,
        competition: CompetitionService | None = None,
    ) -> None:
        self._accounts = accounts
        self.registry = VLLMNamesRegistry()
        self.registry.register(EngineCollector(engine, model_names[0]))
        self._model_names = model_names
        self.adapters = AdapterCollector(adapters)
        self.registry.register(self.adapters)
        self.registry.register(TrainingCollector(training, competition))
        self.registry.register(KeyCollector(accounts))
        self.registry.register(ClusterCollector(cluster))
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to first token.", REQUEST_BUCKETS_S
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Time from arrival to last token.", REQUEST_BUCKETS_S)
        self.queued = self._histogram(
            "request_queue_time_seconds", "Time from arrival to first prefill.", REQUEST_BUCKETS_S
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Time from first prefill to first token.", REQUEST_BUCKETS_S
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Time from first token to last token.", REQUEST_BUCKETS_S
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "Time from first prefill to last token.", REQUEST_BUCKETS_S
        )
        self.prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a request's prompts.", LENGTHS)
        self.lengths = self._histogram("request_generation_tokens", "Tokens generated for a request.", LENGTHS)
        self.longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest sequence of a request.", LENGTHS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between two tokens of a sequence.", TOKEN_BUCKETS_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", TOKEN_BUCKETS_S
        )
        self.recent_first_token, self.recent_inter_token = RecentValues(), RecentValues()
        self._answered = Counts[int]()  # responses by status
        self.finished = self._counter(
            "request_success",
            "Sequences ended: stop, length, repetition, abort or error.",
            (MODEL_LABEL, "finished_reason"),
        )
        self.client_disconnects = self._counter("client_disconnects", "Requests whose client left before the end.")
        self.responses = self._counter("http_responses", "HTTP responses by status.", ("status",))
        self.ignored_fields = self._counter("ignored_fields", "Unknown fields of request bodies that were ignored.")
        self.repaired = self._counter(
            "tool_calls_repaired", "Tool calls that were repaired: form, end, quotes or fence.", ("kind",)
        )
        held = Gauge(PREFIX + "queue_sequences_held", "Sequences inside the bounded queue.", registry=self.registry)
        held.set_function(lambda: gate.held)
        limit = Gauge(PREFIX + "queue_sequences_limit", "Places in the bounded queue.", registry=self.registry)
        limit.set(gate.limit)

    def exposition(self, key: NamedKey) -> bytes:
        """The metrics that a key sees, in Prometheus's text format."""
        return generate_latest(self.registry if key.adapters is None else SeenMetrics(self.registry, key))

    def counters(self) -> Counts[Counted]:
        """What `/v1/stats` shows the load by. `running` is no counter: it is the number of requests under way."""
        counts = Counts[Counted]()
        for account in self._accounts.all():
            of = ("key", account.key.name)
            counts[*of, "requests"], counts[*of, "running"] = account.requests, account.running
            counts[*of, "tokens"] = account.completion_tokens
        for ref, served in self.adapters.counts():
            of = ("version", str(ref))
            counts[*of, "requests"] += served.requests
            counts[*of, "running"] += served.running
            counts[*of, "tokens"] += served.generation_tokens
        for status, answers in self._answered.items():
            counts["status", str(status), "responses"] = answers
        return counts

    def observe_response(self, status: int) -> None:
        self.responses.labels(str(status)).inc()
        self._answered[status] += 1

    def observe_repair(self, kind: RepairKind) -> None:
        self.repaired.labels(kind).inc()

    def observe_first_token(self, model: str, seconds: float) -> None:
        self.ttft.labels(model).observe(seconds)
        self.recent_first_token.add(seconds)

    def observe_inter_token(self, model: str, seconds: float) -> None:
        self.inter_token.labels(model).observe(seconds)
        self.recent_inter_token.add(seconds)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram by base model, each with its series from the start."""
        histogram = Histogram(PREFIX + name, about, [MODEL_LABEL], buckets=buckets, registry=self.registry)
        for model_name in self._model_names:
            histogram.labels(model_name)
        return histogram

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self.registry)


@dataclass(slots=True)
class RequestObserver:
    """Counts one request from its events, in a `with` block. Sequences that have not finished when the block ends count
    as aborted or failed.

    `model` is the name of its base model. `served` are the counts of its adapter version, and `account` those of its
    key. `unfinished` is the number of its sequences that have not finished; at first, none has. `tokens` has the tokens
    of each sequence, and `first_token_at` and `last_token_at` the times (`time.monotonic`) of its first and last one.
    The time to the first token is observed when that comes, so it counts for requests that are given up later.
    """

    metrics: ServerMetrics
    model: str
    served: ServedCounts
    account: Account
    unfinished: int
    entered_at: float = 0.0
    tokens: Counts[int] = field(default_factory=Counts)
    first_token_at: dict[int, float] = field(default_factory=dict)
    last_token_at: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.served.requests += 1
        self.served.running += 1
        self.entered_at = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.served.running -= 1
        aborted = kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit, AbortedError))
        self.metrics.finished.labels(self.model, "abort" if aborted else "error").inc(self.unfinished)

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
            if not self.first_token_at:
                self.metrics.observe_first_token(self.model, now - self.entered_at)
            if (before := self.last_token_at.get(output.index)) is not None:
                self.metrics.observe_inter_token(self.model, (now - before) / len(output.token_ids))
            self.first_token_at.setdefault(output.index, now)
            self.last_token_at[output.index] = now
            self.tokens[output.index] += len(output.token_ids)
            self.served.generation_tokens += len(output.token_ids)
            self.account.add_completion(len(output.token_ids))
        if output.finish_reason:
            self._count_end(output.finish_reason)
            self._observe_pace(output.index)

    def _count_end(self, reason: FinishReason) -> None:
        self.unfinished -= 1
        self.metrics.finished.labels(self.model, reason.value).inc()

    def _observe_pace(self, index: int) -> None:
        if (later := self.tokens[index] - 1) > 0:
            self.metrics.per_token.labels(self.model).observe(
                (self.last_token_at[index] - self.first_token_at[index]) / later
            )

    def _observe_end(self, end: RequestFinished) -> None:
        self.served.finished += 1
        self.served.latency_s += end.finished_at - end.arrived_at
        self.served.prompt_tokens += end.prompt_tokens
        self.account.cached_tokens += end.cached_tokens
        self.metrics.e2e.labels(self.model).observe(end.finished_at - end.arrived_at)
        self.metrics.queued.labels(self.model).observe(end.started_at - end.arrived_at)
        self.metrics.inference.labels(self.model).observe(end.finished_at - end.started_at)
        self.metrics.prompt_lengths.labels(self.model).observe(end.prompt_tokens)
        self.metrics.lengths.labels(self.model).observe(end.completion_tokens)
        if end.completion_tokens:
            self.metrics.longest.labels(self.model).observe(max(self.tokens.values(), default=0))
            self.metrics.prefill.labels(self.model).observe(end.first_token_at - end.started_at)
            self.metrics.decode.labels(self.model).observe(end.finished_at - end.first_token_at)
