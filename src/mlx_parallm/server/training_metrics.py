"""Training's part of the metrics, by trained adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.core import TrainingClient, TrainingStatus

PREFIX = "mlx_parallm_rl_"
COLLECTED = "trajectories_collected"

GAUGES: dict[str, tuple[str, Callable[[TrainingStatus], float | None]]] = {
    # A counter by nature, and a gauge because its name is fixed: a counter's would end with _total.
    COLLECTED: ("Trajectories collected; only grows.", lambda status: status.trajectories_collected),
    "trajectories_waiting": ("Trajectories that wait for a reward.", lambda status: status.trajectories_waiting),
    "groups_ready": ("Complete groups that wait for an update.", lambda status: status.groups_ready),
    "step": ("Optimizer steps of the policy.", lambda status: status.step),
    "updates_per_second": ("Updates per second, lately.", lambda status: status.updates_per_second),
    "training_loss": ("Loss of the last update.", lambda status: status.metrics.get("loss")),
    "reward_mean": ("Mean reward of the last update.", lambda status: status.metrics.get("reward_mean")),
    "reward_std": ("Rewards' standard deviation, last update.", lambda status: status.metrics.get("reward_std")),
    "reward_running_mean": ("Running mean of rewards.", lambda status: status.reward_running_mean),
    "kl": (
        "KL to the base in nats a token, last update: estimated from a sample of its tokens.",
        lambda status: status.metrics.get("kl"),
    ),
    "entropy": ("Entropy in nats, last update.", lambda status: status.metrics.get("entropy")),
    "clip_fraction": ("Share of tokens clipped, last update.", lambda status: status.metrics.get("clip_fraction")),
    "dual_clip_fraction": (
        "Share of tokens whose loss the dual clip bounds, last update.",
        lambda status: status.metrics.get("dual_clip_fraction"),
    ),
    "ratio": ("Mean policy ratio, last update.", lambda status: status.metrics.get("ratio_mean")),
    "ratio_max": ("Largest policy ratio of a token, last update.", lambda status: status.metrics.get("ratio_max")),
    "staleness": ("Mean versions of lag, last update.", lambda status: status.metrics.get("staleness")),
    "last_update_timestamp_seconds": ("Unix time of the last update.", lambda status: status.last_update),
}
REASONS: dict[str, tuple[str, Callable[[TrainingStatus], Mapping[str, int]]]] = {
    "dropped": ("Trajectories dropped, by reason.", lambda status: status.drops),
    "skipped": ("Updates skipped, by reason.", lambda status: status.skips),
}
LABEL = "adapter"


class TrainingMetrics(Collector):
    """Reads training once per scrape. Event loop only.

    A figure that nothing is known of yet has no sample. With training off there is one sample, of trajectories
    collected: 0, of no adapter.
    """

    def __init__(self, training: TrainingClient) -> None:
        self._training = training

    def collect(self) -> Iterator[Metric]:
        trained = [status for status in statuses(self._training) if status.enabled]
        for name, (about, read) in GAUGES.items():
            yield _gauge(name, about, {status.adapter: read(status) for status in trained})
        updates = CounterMetricFamily(f"{PREFIX}updates", "Optimizer updates made.", labels=[LABEL])
        state = GaugeMetricFamily(f"{PREFIX}state", "1 for what training does now.", labels=[LABEL, "state"])
        for status in trained:
            updates.add_metric([status.adapter], status.updates_total)
            state.add_metric([status.adapter, status.state], 1)
        yield from (updates, state)
        for name, (about, counts) in REASONS.items():
            yield _by_reason(name, about, {status.adapter: counts(status) for status in trained})


def statuses(training: TrainingClient) -> list[TrainingStatus]:
    """Of every trained adapter; at least the default one's."""
    default = training.status()
    others = [training.status(name) for name in default.trained if name != default.adapter]
    return [default, *others]


def _gauge(name: str, about: str, values: Mapping[str, float | None]) -> Metric:
    if not values and name == COLLECTED:
        return GaugeMetricFamily(PREFIX + name, about, value=0)
    family = GaugeMetricFamily(PREFIX + name, about, labels=[LABEL])
    for adapter, value in values.items():
        if value is not None:
            family.add_metric([adapter], value)
    return family


def _by_reason(name: str, about: str, counts: Mapping[str, Mapping[str, int]]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, about, labels=[LABEL, "reason"])
    for adapter, by_reason in counts.items():
        for reason, count in by_reason.items():
            family.add_metric([adapter, reason], count)
    return family
