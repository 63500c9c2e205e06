"""Prometheus metrics that are read on each scrape: the engine's and the adapters'.

Each table maps a metric's name, without its prefix, to its help text and to the function that reads it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mlx_parallm.adapters.cards import AdapterStats
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterClient, AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.engine.figures import EngineStats, Histogram

S = TypeVar("S")
Table = Mapping[str, tuple[str, Callable[[S], float]]]

PREFIX = "mlx_parallm_"
MODEL_LABEL = "model_name"
"""The label with the name of the base model."""


def _read(gauges: Table[S], counters: Table[S], stats: S) -> Iterator[Metric]:
    for name, (about, read) in gauges.items():
        yield GaugeMetricFamily(PREFIX + name, about, value=float(read(stats)))
    for name, (about, read) in counters.items():
        yield CounterMetricFamily(PREFIX + name, about, value=float(read(stats)))


# -- engine ----------------------------------------------------------------------------------------

BASE_GAUGES: Table[EngineStats] = {
    "num_requests_running": ("Sequences that have a row of the batch.", lambda stats: stats.running),
    "num_requests_waiting": ("Sequences that wait for a row of the batch.", lambda stats: stats.waiting),
    "kv_cache_usage_perc": (
        "Share of the KV pool's budget that rows use, 0 to 1.",
        lambda stats: stats.kv_bytes_held / stats.kv_bytes_budget if stats.kv_bytes_budget else 0.0,
    ),
    "kv_cache_bytes_held": ("Bytes of the KV pool that rows use.", lambda stats: stats.kv_bytes_held),
    "kv_cache_bytes_cached": (
        "Bytes of cached prefixes that no row uses; rows get them when they need memory.",
        lambda stats: stats.kv_bytes_cached,
    ),
    "kv_cache_tokens": ("Tokens of rows in the KV pool; shared ones count once.", lambda stats: stats.kv_tokens_used),
}
BASE_COUNTERS: Table[EngineStats] = {
    "num_preemptions": (
        "Rows recomputed because KV memory ran out, a unit of device work failed, or another key had too few rows.",
        lambda stats: stats.preemptions_total,
    ),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_cache_queries_total,
    ),
    "prefix_cache_hits": (
        "Prompt tokens whose keys and values were taken from the prefix cache.",
        lambda stats: stats.prefix_cache_hits_total,
    ),
    "external_prefix_cache_queries": (
        "Prompt tokens looked up in the files of the prefix cache, because its memory did not have them.",
        lambda stats: stats.external_prefix_cache_queries_total,
    ),
    "external_prefix_cache_hits": (
        "Prompt tokens whose keys and values were read from files of the prefix cache.",
        lambda stats: stats.external_prefix_cache_hits_total,
    ),
    "prompt_tokens": ("Prompt tokens processed.", lambda stats: stats.prompt_tokens_total),
    "generation_tokens": ("Tokens generated.", lambda stats: stats.generation_tokens_total),
    "spec_decode_num_draft_tokens": (
        "Guessed tokens that a forward pass computed and checked.",
        lambda stats: stats.draft_tokens_total,
    ),
    "spec_decode_num_accepted_tokens": (
        "Guessed tokens that were right.",
        lambda stats: stats.accepted_draft_tokens_total,
    ),
}
ENGINE_GAUGES: Table[EngineStats] = {
    "engine_paused": ("1 from POST /pause to POST /resume.", lambda stats: stats.paused),
    "engine_alive": ("1 while the device thread runs.", lambda stats: stats.alive),
    "process_footprint_bytes": ("Bytes of memory that this process takes.", lambda stats: stats.machine.footprint),
    "process_footprint_limit_bytes": (
        "Bytes above which memory counts as short; 0 if it is not watched.",
        lambda stats: stats.machine.footprint_limit,
    ),
    "memory_relief": (
        "What is done about short memory: 0 nothing, 1 no cached prefixes, 2 training waits too, 3 no new requests.",
        lambda stats: stats.machine.relief,
    ),
    "training_held": (
        "1 while training waits for power, cooling or memory.",
        lambda stats: bool(stats.machine.training_waits_for),
    ),
    "training_share_now": (
        "Share of device time that training got in the last window.",
        lambda stats: stats.training_share,
    ),
    "training_share_target": (
        "Share of device time for training while requests run.",
        lambda stats: stats.schedule.training_time_share,
    ),
    "decode_stall_budget_seconds": (
        "Longest time for other work between two decode steps; how much work fits this time is predicted.",
        lambda stats: stats.schedule.max_decode_stall_s,
    ),
    "decode_gap_largest_seconds": (
        "The longest time between two decode steps since start.",
        lambda stats: stats.decode_gaps.largest,
    ),
}
ENGINE_COUNTERS: Table[EngineStats] = {
    "engine_steps": ("Forward passes launched that draw tokens.", lambda stats: stats.steps_total),
    "engine_failed_steps": (
        "Units of device work that failed, except those of training.",
        lambda stats: stats.failed_steps_total,
    ),
    "engine_aborted": ("Requests aborted before their end.", lambda stats: stats.aborted_total),
}
ENGINE_HISTOGRAMS: Mapping[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "decode_gap_seconds": (
        "Time between two decode steps, while rows wait for the second.",
        lambda stats: stats.decode_gaps,
    ),
    "training_share": (
        "Share of device time that training got, for each window in which training and requests always had work.",
        lambda stats: stats.training_shares,
    ),
}


class EngineCollector(Collector):
    """Reads the engine once per scrape, so that all its values are from the same moment. `first`: the name of the first
    base model."""

    def __init__(self, engine: EngineClient, first: str) -> None:
        self._engine = engine
        self._first = first

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from _read(ENGINE_GAUGES, ENGINE_COUNTERS, stats)
        yield from _read_bases(stats.bases or {self._first: stats})
        for name, (about, values) in ENGINE_HISTOGRAMS.items():
            yield _histogram(PREFIX + name, about, values(stats))
        memory = GaugeMetricFamily(PREFIX + "memory_bytes", "Device memory by what holds it.", labels=["account"])
        for account, held in stats.memory_bytes.items():
            memory.add_metric([account], held)
        yield memory


def _read_bases(bases: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """The metrics that each base model has of its own."""
    for kind, table in ((GaugeMetricFamily, BASE_GAUGES), (CounterMetricFamily, BASE_COUNTERS)):
        for name, (about, read) in table.items():
            family = kind(PREFIX + name, about, labels=[MODEL_LABEL])
            for base, stats in bases.items():
                family.add_metric([base], float(read(stats)))
            yield family
    yield _cache_config(bases)


def _cache_config(bases: Mapping[str, EngineStats]) -> Metric:
    """The blocks of the KV pools in vLLM's form: the numbers are labels, and the value is 1."""
    labels = (MODEL_LABEL, "block_size", "num_gpu_blocks")
    family = GaugeMetricFamily(
        PREFIX + "cache_config_info", "Tokens of a KV block, and number of blocks.", labels=labels
    )
    for base, stats in bases.items():
        if stats.kv_blocks:
            family.add_metric((base, str(stats.kv_block_tokens), str(stats.kv_blocks)), 1)
    return family


def _histogram(name: str, about: str, histogram: Histogram) -> Metric:
    """Prometheus's buckets are cumulative; `Histogram` counts each bucket alone."""
    bounds = map(floatToGoString, (*histogram.bounds, float("inf")))
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=histogram.total)


# -- adapters --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ServedCounts:
    """Work done for one adapter version. `running`: requests under way. `latency_s` is the sum over finished requests,
    in seconds."""

    requests: int = 0
    running: int = 0
    finished: int = 0
    latency_s: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0


ADAPTER_GAUGES: Table[AdapterStats] = {
    "lora_slots": ("Adapter slots, not counting the base model's.", lambda stats: stats.slots),
    "lora_slots_used": ("Slots that hold an adapter version.", lambda stats: stats.slots_used),
    "lora_slots_pinned": ("Slots that live sequences hold.", lambda stats: stats.slots_pinned),
    "lora_bank_bytes": ("Bytes of the adapter bank, which has all slots.", lambda stats: stats.bank_bytes),
    "lora_flip_seconds_last": ("Time to make the last loaded version live.", lambda stats: stats.flip_s_last),
    "lora_flip_seconds_max": ("Longest time to make a loaded version live.", lambda stats: stats.flip_s_max),
    "lora_stage_seconds_last": ("Time to load the last version into its slot.", lambda stats: stats.stage_s_last),
}
ADAPTER_COUNTERS: Table[AdapterStats] = {
    "lora_swaps": (
        "Changes of the live version of a name, or of the route for requests that name no adapter.",
        lambda stats: stats.swaps_total,
    ),
    "lora_staged": ("Adapter versions loaded into a slot.", lambda stats: stats.staged_total),
    "lora_evicted": ("Adapter versions that lost their slot.", lambda stats: stats.evicted_total),
    "checkpoint_saves": ("Checkpoints written.", lambda stats: stats.checkpoint_saves_total),
}
SERVED_COUNTERS: Table[ServedCounts] = {
    "adapter_requests": ("Requests begun.", lambda served: served.requests),
    "adapter_prompt_tokens": ("Prompt tokens of finished requests.", lambda served: served.prompt_tokens),
    "adapter_generation_tokens": ("Tokens generated.", lambda served: served.generation_tokens),
}
VERSION_LABELS = (MODEL_LABEL, "adapter", "version")
Served = tuple[str, AdapterRef]
"""A base model's name and an adapter version."""


class AdapterCollector(Collector):
    """Reads the adapters once per scrape, and keeps the counts of each version. Used on the event loop's thread only.

    Versions that can no longer be requested lose their series, so the number of series is bounded however many versions
    a trainer publishes.
    """

    def __init__(self, adapters: AdapterClient) -> None:
        self._adapters = adapters
        self._served: dict[Served, ServedCounts] = {}

    def served(self, base: str, ref: AdapterRef) -> ServedCounts:
        """The counts of one version of an adapter of a base model; the caller adds to them."""
        if (base, ref) not in self._served:
            self._remove_gone()
            self._served[base, ref] = ServedCounts()
        return self._served[base, ref]

    def requests(self) -> Counter[AdapterRef]:
        """Requests begun, by version; those of `BASE_ADAPTER` are of all base models together."""
        begun: Counter[AdapterRef] = Counter()
        for (_, ref), served in self._served.items():
            begun[ref] += served.requests
        return begun

    def counts(self) -> Iterator[tuple[AdapterRef, ServedCounts]]:
        """The counts of all versions, by base model."""
        return ((ref, served) for (_, ref), served in self._served.items())

    def collect(self) -> Iterator[Metric]:
        stats = self._adapters.stats()
        yield from _read(ADAPTER_GAUGES, ADAPTER_COUNTERS, stats)
        yield _requests_info(stats)
        self._remove_gone()
        for name, (about, read) in SERVED_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, f"{about} By adapter version.", labels=VERSION_LABELS)
            for of, served in self._served.items():
                counter.add_metric(_labels(of), read(served))
            yield counter
        about = "Time from arrival to last token, by adapter version."
        latency = SummaryMetricFamily(PREFIX + "adapter_request_latency_seconds", about, labels=VERSION_LABELS)
        for of, served in self._served.items():
            latency.add_metric(_labels(of), served.finished, served.latency_s)
        yield latency

    def _remove_gone(self) -> None:
        known = {BASE_ADAPTER, *(card.ref for card in self._adapters.cards())}
        self._served = {(base, ref): served for (base, ref), served in self._served.items() if ref in known}


def _labels(served: Served) -> tuple[str, ...]:
    base, ref = served
    return base, ref.name, str(ref.version)


def _requests_info(stats: AdapterStats) -> Metric:
    """The adapters of the live requests in vLLM's form: their names are labels, and the value is the time."""
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(PREFIX + "lora_requests_info", "Adapters of the live requests.", labels=labels)
    family.add_metric((str(stats.slots), ",".join(stats.running), ",".join(stats.waiting)), time.time())
    return family
