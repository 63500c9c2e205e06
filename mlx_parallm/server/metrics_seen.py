"""The metrics that a key which is limited to some adapters sees: those of these adapters, and its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from mlx_parallm.server.access.keys import NamedKey

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
