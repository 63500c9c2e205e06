"""What is remembered of rewards from one update to the next."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.rl.advantages import PEOPLE, RunningBaseline
from mlx_parallm.rl.groups import FEEDBACK
from mlx_parallm.rl.trend import RewardTrend

_MOST_SCORERS = 32
_LONGEST_SCORER = 100

_COUNT_OF, _MEAN_OF, _VARIANCE_OF = "baseline_count.", "baseline_mean.", "baseline_variance."


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
        """What `restore` needs, as a checkpoint's metrics; a scorer with a very long name is left out."""
        metrics = self.trend.to_metrics()
        for scorer, baseline in self._baselines.items():
            if len(scorer) <= _LONGEST_SCORER and scorer.isprintable():
                metrics[_COUNT_OF + scorer] = float(baseline.count)
                metrics[_MEAN_OF + scorer] = baseline.mean
                metrics[_VARIANCE_OF + scorer] = baseline.variance
        return metrics

    def restore(self, metrics: Mapping[str, float]) -> None:
        self.trend = RewardTrend.of_metrics(metrics)
        scorers = [name.removeprefix(_COUNT_OF) for name in metrics if name.startswith(_COUNT_OF)]
        self._baselines = {
            scorer: RunningBaseline(
                int(metrics[_COUNT_OF + scorer]),
                metrics[_MEAN_OF + scorer],
                metrics.get(_VARIANCE_OF + scorer, PEOPLE.variance),  # older checkpoints lack it
            )
            for scorer in scorers
            if _MEAN_OF + scorer in metrics
        }
