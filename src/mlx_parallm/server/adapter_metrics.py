"""The adapters' part of the metrics: the bank's state, and what each version has served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from mlx_parallm.core import BASE_ADAPTER, AdapterClient, AdapterRef, AdapterStats

PREFIX = "mlx_parallm_"

GAUGES: dict[str, tuple[str, Callable[[AdapterStats], float]]] = {
    "lora_slots": ("Adapter slots of the bank, the base's not counted.", lambda stats: stats.slots),
    "lora_slots_used": ("Slots that hold an adapter version.", lambda stats: stats.slots_used),
    "lora_slots_pinned": ("Slots that live sequences hold.", lambda stats: stats.slots_pinned),
    "lora_bank_bytes": ("Bytes of the adapter bank.", lambda stats: stats.bank_bytes),
    "lora_flip_seconds_last": ("How long the last flip held the device.", lambda stats: stats.flip_s_last),
    "lora_flip_seconds_max": ("How long the longest flip held the device.", lambda stats: stats.flip_s_max),
    "lora_stage_seconds_last": ("How long the last version took to stage.", lambda stats: stats.stage_s_last),
}
COUNTERS: dict[str, tuple[str, Callable[[AdapterStats], float]]] = {
    "lora_swaps": ("Times that a name, or the route, came to mean another version.", lambda stats: stats.swaps_total),
    "lora_staged": ("Adapter versions staged into a slot.", lambda stats: stats.staged_total),
    "lora_evicted": ("Adapter versions that lost their slot.", lambda stats: stats.evicted_total),
    "checkpoint_saves": ("Checkpoints written.", lambda stats: stats.checkpoint_saves_total),
}


@dataclass(slots=True)
class Tally:
    """What one version has served. Latencies in seconds, of finished requests."""

    requests: int = 0
    finished: int = 0
    latency_s: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0


SERVED: dict[str, tuple[str, Callable[[Tally], float]]] = {
    "adapter_requests": ("Requests begun.", lambda tally: tally.requests),
    "adapter_prompt_tokens": ("Prompt tokens of finished requests.", lambda tally: tally.prompt_tokens),
    "adapter_generation_tokens": ("Tokens generated.", lambda tally: tally.generation_tokens),
}
LABELS = ("adapter", "version")


class AdapterMetrics(Collector):
    """Reads the adapters once per scrape. Event loop only.

    A version that nobody can ask for any more loses its series, so their number is bounded however many
    versions a trainer publishes.
    """

    def __init__(self, adapters: AdapterClient) -> None:
        self._adapters = adapters
        self._tallies: dict[AdapterRef, Tally] = {}

    def tally(self, ref: AdapterRef) -> Tally:
        """The version's own, to be added to."""
        if ref not in self._tallies:
            self._forget_gone()
            self._tallies[ref] = Tally()
        return self._tallies[ref]

    def collect(self) -> Iterator[Metric]:
        stats = self._adapters.stats()
        for name, (about, read) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, about, value=float(read(stats)))
        for name, (about, read) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, about, value=float(read(stats)))
        yield _requests_info(stats)
        self._forget_gone()
        yield from self._served()

    def _served(self) -> Iterator[Metric]:
        for name, (about, read) in SERVED.items():
            counter = CounterMetricFamily(PREFIX + name, f"{about} By adapter version.", labels=LABELS)
            for ref, tally in self._tallies.items():
                counter.add_metric((ref.name, str(ref.version)), read(tally))
            yield counter
        about = "Arrival to last token, by adapter version."
        latency = SummaryMetricFamily(PREFIX + "adapter_request_latency_seconds", about, labels=LABELS)
        for ref, tally in self._tallies.items():
            latency.add_metric((ref.name, str(ref.version)), tally.finished, tally.latency_s)
        yield latency

    def _forget_gone(self) -> None:
        known = {BASE_ADAPTER, *(card.ref for card in self._adapters.cards())}
        self._tallies = {ref: tally for ref, tally in self._tallies.items() if ref in known}


def _requests_info(stats: AdapterStats) -> Metric:
    """vLLM's form: names in labels, the time as value."""
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(PREFIX + "lora_requests_info", "Adapters of the live requests.", labels=labels)
    family.add_metric((str(stats.slots), ",".join(stats.running), ",".join(stats.waiting)), time.time())
    return family
