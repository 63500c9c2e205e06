"""Prometheus metrics of comparisons of two versions of an adapter, read on each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.core import EVERYTHING, TrainingClient
from mlx_parallm.server.metrics_training import RL_PREFIX


class ComparisonCollector(Collector):
    """Comparisons by adapter. Used on the event loop's thread only."""

    def __init__(self, training: TrainingClient | None) -> None:
        self._training = training

    def collect(self) -> Iterator[Metric]:
        about = "1 while two versions of the adapter are compared."
        running = GaugeMetricFamily(RL_PREFIX + "comparison_running", about, labels=["adapter"])
        about = "Mean reward of each version in the comparison that runs, or in the last one."
        rewards = GaugeMetricFamily(RL_PREFIX + "comparison_reward_mean", about, labels=["adapter", "version"])
        about = "Comparisons ended, by verdict."
        ended = CounterMetricFamily(RL_PREFIX + "comparisons", about, labels=["adapter", "verdict"])
        if self._training is not None:
            competition = self._training.competition
            for card in competition.cards(EVERYTHING):
                running.add_metric([card.adapter], float(card.verdict == "running"))
                for version, mean in ((card.live, card.live_mean), (card.candidate, card.candidate_mean)):
                    if mean is not None:
                        rewards.add_metric([card.adapter, str(version.version)], mean)
            for status in self._training.statuses(reader=EVERYTHING):
                for verdict, count in competition.ended(status.adapter).items():
                    ended.add_metric([status.adapter, verdict], count)
        yield from (running, rewards, ended)
