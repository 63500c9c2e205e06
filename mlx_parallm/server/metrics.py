"""The Prometheus metrics of one server, all named `mlx_parallm_*`: those of `metrics_table`, which are read on each
scrape, and requests, latencies and responses, which are counted here; what a key sees of them that is limited to some
adapters; and what the server did in the last minutes.

Where vLLM has the same metric, the name after the prefix and the meaning are vLLM's, and it is exported under vLLM's
name too. The registry belongs to the app, not to the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterClient, AdapterRef
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.core.requests import (
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SequenceOutput,
    SequencePooled,
)
from mlx_parallm.core.text import RepairKind
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.errors import AbortedError
from mlx_parallm.extras_table import hooks
from mlx_parallm.rl.status import TrainingStatus
from mlx_parallm.server import metrics_table as tables
from mlx_parallm.server.access import NamedKey
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.limits import Account, Accounts, SequenceGate
from mlx_parallm.server.metrics_table import MODEL_LABEL, PREFIX, Labels, ServedCounts

if TYPE_CHECKING:
    from mlx_parallm.server.backend import Backend

# -- the last minutes, which `/v1/stats` shows ------------------------------------------------------

KEPT_INTERVALS = 300
"""Intervals that are kept, of about a second each."""
WINDOW_S, MOST_VALUES = 60.0, 4096
"""Percentiles are of the values of so many seconds, and of at most so many."""

Counted = tuple[str, str, str]
"""What a counter counts: of a `key`, a `version` or a `status`; its name; and what of it."""


class Interval(WireOutput):
    """About a second of the history. It is longer when one unit of device work takes longer."""

    number: int
    """Counts intervals from 1, without gaps."""
    at: float
    """Unix time of its end, in seconds."""
    seconds: float
    """Its length."""
    decode: float
    """Seconds of device time in which tokens were sampled. A unit of work counts in the interval in which it ends."""
    prefill: float
    """Seconds of device time in which prompts were computed."""
    training: float
    """Seconds of device time of updates."""
    other: float
    """Seconds of device time in which adapters were copied into the bank, or a base model was loaded."""
    generated_tokens: int
    """Tokens generated."""
    prompt_tokens: int
    """Prompt tokens processed."""
    running: int
    """Sequences with a row, at its end."""
    waiting: int
    """Sequences without a row, at its end."""


class History:
    """The last intervals, oldest first. Used on the event loop's thread only; `add` is called once a second.

    Invariant: each interval begins where the one before it ended, so that their seconds add up to the time that passed.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._intervals: deque[Interval] = deque(maxlen=KEPT_INTERVALS)
        self._last: EngineStats | None = None
        self._count = 0

    def add(self, stats: EngineStats) -> None:
        """Ends an interval with this snapshot. Does nothing if the engine has taken no new one since the last call: it
        takes none inside a unit of work."""
        before = self._last
        if before is None or before.taken_at < stats.taken_at:
            self._last = stats
        if before is not None and before.taken_at < stats.taken_at:
            self._count += 1
            age = time.monotonic() - stats.taken_at
            self._intervals.append(_between(before, stats, self._count, self._now() - age))

    def after(self, number: int) -> Sequence[Interval]:
        """The intervals after this one; all that are kept, if there never was such a number."""
        return [each for each in self._intervals if each.number > number or number > self._count]


def _between(before: EngineStats, stats: EngineStats, number: int, at: float) -> Interval:
    device = stats.device_seconds.minus(before.device_seconds)
    return Interval(
        number=number,
        at=round(at, 3),
        seconds=round(stats.taken_at - before.taken_at, 3),
        decode=round(device.decode, 3),
        prefill=round(device.prefill, 3),
        training=round(device.training, 3),
        other=round(device.other, 3),
        generated_tokens=stats.generation_tokens_total - before.generation_tokens_total,
        prompt_tokens=stats.prompt_tokens_total - before.prompt_tokens_total,
        running=stats.running,
        waiting=stats.waiting,
    )


class RecentValues:
    """The values of the last minute. Used on the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST_VALUES)  # when, and what

    def add(self, value: float) -> None:
        self._values.append((self._clock(), value))

    def ranked(self) -> list[float]:
        """The values, in ascending order."""
        since = self._clock() - WINDOW_S
        while self._values and self._values[0][0] < since:
            self._values.popleft()
        return sorted(value for _, value in self._values)


class RecentGrowth:
    """By how much counters have grown in the last minute. Used on the event loop's thread only; `add` is called once a
    second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: Counts[Counted] = Counts()
        self._grown: deque[tuple[float, Counts[Counted]]] = deque()  # when, and the growth since the one before

    def add(self, counters: Counts[Counted]) -> None:
        now = self._clock()
        self._grown.append((now, counters - self._last))
        self._last = counters
        while self._grown[0][0] < now - WINDOW_S:
            self._grown.popleft()

    def until(self, counters: Counts[Counted]) -> Counts[Counted]:
        """Their growth from the oldest time in the last minute to these values, where it is above 0."""
        grown = counters - self._last
        for _, one in islice(self._grown, 1, None):
            grown += one
        return grown & counters  # without those that are gone


# -- metrics ---------------------------------------------------------------------------------------


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


class VLLMNames(CollectorRegistry):
    """A registry that exports the metrics of `in_vllm` twice: as `mlx_parallm_NAME`, and for the dashboards of vLLM as
    `vllm:NAME`. There each metric with the name of the model has the label `engine` too, the number of one of several
    engines. There is one here."""

    def __init__(self) -> None:
        super().__init__()
        self.in_vllm = {row.name for table in tables.ALL for row in table.rows if row.in_vllm}

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            yield metric
            if metric.name.removeprefix(PREFIX) in self.in_vllm:
                renamed = Metric(_vllm_name(metric.name), metric.documentation, metric.type)
                renamed.samples = [_vllm_sample(sample) for sample in metric.samples]
                yield renamed


def _vllm_name(name: str) -> str:
    return "vllm:" + name.removeprefix(PREFIX)


def _vllm_sample(sample: Sample) -> Sample:
    engine = {"engine": "0"} if MODEL_LABEL in sample.labels else {}
    return sample._replace(name=_vllm_name(sample.name), labels={**engine, **sample.labels})


class VersionCounts:
    """The work done for each adapter version. Used on the event loop's thread only.

    Versions that can no longer be requested lose their counts, so the number of series is bounded however many versions
    a trainer publishes.
    """

    def __init__(self, adapters: AdapterClient) -> None:
        self._adapters = adapters
        self._served: dict[tuple[str, AdapterRef], ServedCounts] = {}  # by the name of the base model, and version

    def served(self, base: str, ref: AdapterRef) -> ServedCounts:
        """The counts of one version of an adapter of a base model; the caller adds to them."""
        if (base, ref) not in self._served:
            self._remove_gone()
            self._served[base, ref] = ServedCounts()
        return self._served[base, ref]

    def requests(self) -> Counts[AdapterRef]:
        """Requests begun, by version; those of `BASE_ADAPTER` are of all base models together."""
        begun: Counts[AdapterRef] = Counts()
        for ref, served in self.counts():
            begun[ref] += served.requests
        return begun

    def counts(self) -> Iterator[tuple[AdapterRef, ServedCounts]]:
        """The counts of all versions, by base model."""
        return ((ref, served) for (_, ref), served in self._served.items())

    def by_labels(self) -> Mapping[Labels, ServedCounts]:
        """The counts of the versions that can be requested, by the labels of `metrics_table.VERSIONS`."""
        self._remove_gone()
        return {(base, ref.name, str(ref.version)): served for (base, ref), served in self._served.items()}

    def _remove_gone(self) -> None:
        known = {BASE_ADAPTER, *(card.ref for card in self._adapters.cards())}
        self._served = {(base, ref): served for (base, ref), served in self._served.items() if ref in known}


class ServerMetrics(Collector):
    """All metrics of one app, and what it did in the last minutes, which `/v1/stats` shows."""

    def __init__(self, backend: Backend, gate: SequenceGate, accounts: Accounts) -> None:
        self._backend, self._gate, self._accounts = backend, gate, accounts
        self._model_names = [status.name for status in backend.models.statuses()]
        self.adapters = VersionCounts(backend.adapters)
        self.registry = VLLMNames()
        self.registry.register(self)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to first token.", tables.REQUEST_BUCKETS_S
        )
        self.longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest sequence of a request.", tables.LENGTHS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens of a sequence.",
            tables.TOKEN_BUCKETS_S,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", tables.TOKEN_BUCKETS_S
        )
        self._requests = [(row.read, self._histogram(row.name, row.about, row.buckets)) for row in tables.REQUESTS]
        self.recent_first_token, self.recent_inter_token = RecentValues(), RecentValues()
        self.history, self.growth = History(), RecentGrowth()
        self._answered = Counts[int]()  # responses by status
        self.finished = self._counter(
            "request_success",
            "Sequences ended: stop, length, repetition, abort or error.",
            (MODEL_LABEL, "finished_reason"),
            in_vllm=True,
        )
        self.client_disconnects = self._counter("client_disconnects", "Requests whose client left before the end.")
        self.responses = self._counter("http_responses", "HTTP responses by status.", ("status",))
        self.ignored_fields = self._counter("ignored_fields", "Unknown fields of request bodies that were ignored.")
        self.repaired = self._counter(
            "tool_calls_repaired", "Tool calls that were repaired: form, end, quotes or fence.", ("kind",)
        )

    def collect(self) -> Iterator[Metric]:
        """The metrics of `metrics_table`. Each part is read once, so that all its values are from the same moment."""
        engine = self._backend.engine.stats()
        bases = engine.bases or {self._model_names[0]: engine}
        yield from tables.ENGINE.read({(): engine})
        yield from tables.BASES.read({(name,): stats for name, stats in bases.items()})
        yield from tables.QUEUE.read({(): self._gate})
        yield from tables.ADAPTERS.read({(): self._backend.adapters.stats()})
        yield from tables.VERSIONS.read(self.adapters.by_labels())
        yield from tables.KEYS.read({(account.key.name,): account for account in self._accounts.all()})
        yield from self._training_metrics()
        for _, metrics in hooks("metrics"):
            yield from metrics(self._backend)

    def _training_metrics(self) -> Iterator[Metric]:
        """If the server does not train, the only sample is 0 collected trajectories, without a label."""
        training = self._backend.training
        statuses = [] if training is None else training.statuses(reader=EVERYTHING)
        by_adapter: dict[Labels, TrainingStatus] = {(status.adapter,): status for status in statuses}
        yield from tables.COLLECTED.read(by_adapter or {(): TrainingStatus()})
        yield from tables.TRAINING.read(by_adapter)

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

    def note_second(self, stats: EngineStats) -> None:
        """Adds to what `/v1/stats` shows of the last minutes. Called once a second."""
        self.history.add(stats)
        self.growth.add(self.counters())

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

    def observe_end(self, model: str, end: RequestFinished) -> None:
        for read, histogram in self._requests:
            if (value := read(end)) is not None:
                histogram.labels(model).observe(value)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram by base model, each with its series from the start. vLLM has each of them too."""
        self.registry.in_vllm.add(name)
        histogram = Histogram(PREFIX + name, about, [MODEL_LABEL], buckets=buckets, registry=self.registry)
        for model_name in self._model_names:
            histogram.labels(model_name)
        return histogram

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = (), in_vllm: bool = False) -> Counter:
        if in_vllm:
            self.registry.in_vllm.add(name)
        return Counter(PREFIX + name, about, labels, registry=self.registry)


@dataclass(slots=True)
class RequestObserver:
    """Counts one request from its events, in a `with` block. Sequences that have not finished when the block ends count
    as aborted or failed.

    `served` are the counts of its adapter version, and `account` those of its key. `unfinished` is the number of its
    sequences that have not finished; at first, none has. `tokens` has the tokens of each sequence, and `first_token_at`
    and `last_token_at` the times (`time.monotonic`) of its first and last one. The time to the first token is observed
    when that comes, so it counts for requests that are given up later.
    """

    metrics: ServerMetrics
    request: GenerationRequest
    account: Account
    model: str = field(init=False)
    served: ServedCounts = field(init=False)
    unfinished: int = field(init=False)
    entered_at: float = 0.0
    tokens: Counts[int] = field(default_factory=Counts)
    first_token_at: dict[int, float] = field(default_factory=dict)
    last_token_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.unfinished = self.request.base, self.request.sequences
        self.served = self.metrics.adapters.served(self.model, self.request.adapter)

    def __enter__(self) -> Self:
        self.account.add_prompt(sum(map(len, self.request.prompts)))
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
        self.metrics.observe_end(self.model, end)
        if end.completion_tokens:
            self.metrics.longest.labels(self.model).observe(max(self.tokens.values(), default=0))
