"""Prometheus metrics of training and of comparisons of two versions, read on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.rl.status import TrainingStatus
from mlx_parallm.server.metrics_collectors import PREFIX

if TYPE_CHECKING:
    from mlx_parallm.rl.competition.service import CompetitionService
    from mlx_parallm.rl.service import TrainingService

RL_PREFIX = PREFIX + "rl_"


def comparison_metrics(competition: CompetitionService | None, trained: Iterable[str]) -> Iterator[Metric]:
    """Comparisons by adapter. `trained`: the names of the adapters in training."""
    about = "1 while two versions of the adapter are compared."
    running = GaugeMetricFamily(RL_PREFIX + "comparison_running", about, labels=["adapter"])
    about = "Mean reward of each version in the comparison that runs, or in the last one."
    rewards = GaugeMetricFamily(RL_PREFIX + "comparison_reward_mean", about, labels=["adapter", "version"])
    about = "Comparisons ended, by verdict."
    ended = CounterMetricFamily(RL_PREFIX + "comparisons", about, labels=["adapter", "verdict"])
    if competition is not None:
        for card in competition.cards(EVERYTHING):
            running.add_metric([card.adapter], float(card.verdict == "running"))
            for version, mean in ((card.live, card.live_mean), (card.candidate, card.candidate_mean)):
                if mean is not None:
                    rewards.add_metric([card.adapter, str(version.version)], mean)
        for adapter in trained:
            for verdict, count in competition.ended(adapter).items():
                ended.add_metric([adapter, verdict], count)
    yield from (running, rewards, ended)


def _evaluated(figure: str) -> Callable[[TrainingStatus], float | None]:
    """Reads a figure of the last evaluation; None if there was none."""
    return lambda status: None if status.evaluation is None else float(getattr(status.evaluation, figure))


COLLECTED = "trajectories_collected"
TRAINING_GAUGES: Mapping[str, tuple[str, Callable[[TrainingStatus], float | None]]] = {
    # A gauge, although it only grows: Prometheus appends _total to a counter's name, and this name is fixed.
    COLLECTED: ("Trajectories collected; only grows.", lambda status: status.trajectories_collected),
    "trajectories_waiting": ("Trajectories that wait for a reward.", lambda status: status.trajectories_waiting),
    "groups_open": ("Groups that wait for more answers.", lambda status: status.groups_open),
    "groups_ready": ("Complete groups that wait for an update.", lambda status: status.groups_ready),
    "step": ("Optimizer steps of the policy.", lambda status: status.step),
    "updates_per_second": ("Recent rate of updates per second.", lambda status: status.updates_per_second),
    "training_loss": ("Loss of the last update.", lambda status: status.metrics.get("loss")),
    "reward_mean": ("Mean reward of the last update.", lambda status: status.metrics.get("reward_mean")),
    "reward_std": ("Standard deviation of rewards, last update.", lambda status: status.metrics.get("reward_std")),
    "reward_running_mean": ("Running mean of rewards.", lambda status: status.reward_running_mean),
    "kl": (
        "KL divergence from the base model in nats a token, last update; estimated unless it is part of the loss.",
        lambda status: status.metrics.get("kl"),
    ),
    "entropy": ("Entropy in nats a token, last update.", lambda status: status.metrics.get("entropy")),
    "clip_fraction": ("Share of tokens clipped, last update.", lambda status: status.metrics.get("clip_fraction")),
    "dual_clip_fraction": (
        "Share of tokens whose loss the dual clip bounds, last update.",
        lambda status: status.metrics.get("dual_clip_fraction"),
    ),
    "ratio": ("Mean policy ratio, last update.", lambda status: status.metrics.get("ratio_mean")),
    "ratio_max": ("Largest policy ratio of a token, last update.", lambda status: status.metrics.get("ratio_max")),
    "staleness": ("Mean staleness in versions, last update.", lambda status: status.metrics.get("staleness")),
    "evaluation_mean": ("Mean reward on the held-out tasks, last evaluation.", _evaluated("mean")),
    "evaluation_low": ("Lower bound of its 95 % confidence interval.", _evaluated("low")),
    "evaluation_high": ("Upper bound of its 95 % confidence interval.", _evaluated("high")),
    "evaluation_answers": ("Answers that were scored, last evaluation.", _evaluated("answers")),
    "evaluation_step": ("Optimizer steps of the version that was evaluated last.", _evaluated("step")),
    "last_update_timestamp_seconds": ("Unix time of the last update.", lambda status: status.last_update),
}
TRAINING_REASONS: Mapping[str, tuple[str, Callable[[TrainingStatus], Mapping[str, int]]]] = {
    "dropped": ("Trajectories dropped, by reason.", lambda status: status.drops),
    "skipped": ("Updates skipped, by reason.", lambda status: status.skips),
    "rollouts": (
        "Tasks that the server has drawn by itself, by outcome.",
        lambda status: {} if status.rollouts is None else status.rollouts.outcomes,
    ),
    "turns": ("Turns of episodes: first, continued or apart.", lambda status: status.turns),
}


class TrainingCollector(Collector):
    """Reads the status of every trained adapter once per scrape. Used on the event loop's thread only.

    A value that is not known yet has no sample. If the server does not train, the only sample is 0 collected
    trajectories, without a label.
    """

    def __init__(self, training: TrainingService | None, competition: CompetitionService | None) -> None:
        self._training, self._competition = training, competition

    def collect(self) -> Iterator[Metric]:
        statuses = [] if self._training is None else self._training.statuses(reader=EVERYTHING)
        for name, (about, read) in TRAINING_GAUGES.items():
            yield _training_gauge(name, about, {status.adapter: read(status) for status in statuses})
        updates = CounterMetricFamily(f"{RL_PREFIX}updates", "Optimizer updates made.", labels=["adapter"])
        state = GaugeMetricFamily(f"{RL_PREFIX}state", "1 for the current state.", labels=["adapter", "state"])
        for status in statuses:
            updates.add_metric([status.adapter], status.updates_total)
            state.add_metric([status.adapter, status.state], 1)
        yield from (updates, state)
        for name, (about, counts) in TRAINING_REASONS.items():
            family = CounterMetricFamily(RL_PREFIX + name, about, labels=["adapter", "reason"])
            for status in statuses:
                for reason, count in counts(status).items():
                    family.add_metric([status.adapter, reason], count)
            yield family
        diverged = CounterMetricFamily(
            RL_PREFIX + "divergences", "Figures beyond their limits.", labels=["adapter", "signal", "action"]
        )
        for status in statuses:
            for (signal, action), count in status.diverged.items():
                diverged.add_metric([status.adapter, signal, action], count)
        yield diverged
        yield from comparison_metrics(self._competition, [status.adapter for status in statuses])


def _training_gauge(name: str, about: str, values: Mapping[str, float | None]) -> Metric:
    if not values and name == COLLECTED:
        return GaugeMetricFamily(RL_PREFIX + name, about, value=0)
    family = GaugeMetricFamily(RL_PREFIX + name, about, labels=["adapter"])
    for adapter, value in values.items():
        if value is not None:
            family.add_metric([adapter], value)
    return family
