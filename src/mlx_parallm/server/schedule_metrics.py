"""How device time was shared, for the metrics: what a decode waited, what training got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from mlx_parallm.core import EngineStats, Histogram
from mlx_parallm.server.adapter_metrics import PREFIX

GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "training_share_now": (
        "Share of device time that training got in the last window.",
        lambda stats: stats.training_share,
    ),
    "training_share_target": (
        "Share of device time for training beside requests.",
        lambda stats: stats.schedule.training_time_share,
    ),
    "decode_stall_budget_seconds": (
        "Time for other work between two decode steps, which is sized to it by prediction.",
        lambda stats: stats.schedule.max_decode_stall_s,
    ),
    "decode_gap_largest_seconds": ("The longest decode gap since start.", lambda stats: stats.decode_gaps.largest),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "decode_gap_seconds": (
        "Between two decode steps while rows wait for the second.",
        lambda stats: stats.decode_gaps,
    ),
    "training_share": (
        "Share of device time that training got, by window in which it and rows wanted it throughout.",
        lambda stats: stats.training_shares,
    ),
}


def schedule_metrics(stats: EngineStats) -> Iterator[Metric]:
    for name, (about, read) in GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, about, value=float(read(stats)))
    for name, (about, values) in HISTOGRAMS.items():
        yield _histogram(PREFIX + name, about, values(stats))


def _histogram(name: str, about: str, histogram: Histogram) -> Metric:
    """Prometheus counts what is at most each bound; ours what is in each bin."""
    bounds = map(floatToGoString, (*histogram.bounds, float("inf")))
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=histogram.total)
