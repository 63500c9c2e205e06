"""Prometheus metrics of comparisons of two versions of an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_parallm.core import EVERYTHING, TrainingClient
from mlx_parallm.server.metrics_collectors import PREFIX

RL_PREFIX = PREFIX + "rl_"


def comparison_metrics(training: TrainingClient | None, trained: Iterable[str]) -> Iterator[Metric]:
    """Comparisons by adapter. `trained`: the names of the adapters in training."""
    about = "1 while two versions of the adapter are compared."
    running = GaugeMetricFamily(RL_PREFIX + "comparison_running", about, labels=["adapter"])
    about = "Mean reward of each version in the comparison that runs, or in the last one."
    rewards = GaugeMetricFamily(RL_PREFIX + "comparison_reward_mean", about, labels=["adapter", "version"])
    about = "Comparisons ended, by verdict."
    ended = CounterMetricFamily(RL_PREFIX + "comparisons", about, labels=["adapter", "verdict"])
    if training is not None:
        competition = training.competition
        for card in competition.cards(EVERYTHING):
            running.add_metric([card.adapter], float(card.verdict == "running"))
            for version, mean in ((card.live, card.live_mean), (card.candidate, card.candidate_mean)):
                if mean is not None:
                    rewards.add_metric([card.adapter, str(version.version)], mean)
        for adapter in trained:
            for verdict, count in competition.ended(adapter).items():
                ended.add_metric([adapter, verdict], count)
    yield from (running, rewards, ended)
