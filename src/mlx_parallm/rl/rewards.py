"""What is remembered of rewards from one update to the next."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.rl.advantages import PEOPLE, RunningBaseline
from mlx_parallm.rl.groups import FEEDBACK
from mlx_parallm.rl.trend import RewardTrend, running_of_metrics, running_to_metrics

_MOST_SCORERS = 32


class RewardMemory:
    """How rewards go (`trend`), and each scorer's baseline for samples that stand alone.

    Baselines are kept for the 32 scorers used last.
    """

    def __init__(self) -> None:
        self.trend = RewardTrend()
        self._baselines: dict[str, RunningBaseline] = {}

    def restart(self) -> None:
        """The policy is another one: its rewards are not the old one's. Baselines are of scorers, and stay."""
        self.trend = RewardTrend()

    def advantage(self, scorer: str, reward: float, scaled: bool = False) -> float | None:
        """Of a sample that stands alone, by the rewards before it; None: it is the scorer's first. Remembers it.

        Nothing is known of the scale of a scorer before its first reward; that of people's scores is (`PEOPLE`).
        """
        baseline = self._baselines.pop(scorer, PEOPLE if scorer == FEEDBACK else None)
        self._baselines[scorer] = baseline.including(reward) if baseline else RunningBaseline.starting_at(reward)
        if len(self._baselines) > _MOST_SCORERS:
            del self._baselines[next(iter(self._baselines))]
        return baseline.advantage(reward, scaled) if baseline else None

    # -- across restarts -------------------------------------------------------------------------

    def to_metrics(self) -> dict[str, float]:
        """What `restore` needs, as a checkpoint's metrics."""
        return self.trend.to_metrics() | running_to_metrics("baseline_", self._baselines)

    def restore(self, metrics: Mapping[str, float]) -> None:
        self.trend = RewardTrend.of_metrics(metrics)
        self._baselines = running_of_metrics("baseline_", metrics)
