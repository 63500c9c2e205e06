"""What is remembered of rewards from one update to the next."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.rl.advantages import PEOPLE, RunningBaseline
from mlx_parallm.rl.groups import FEEDBACK

_MEMORY = 0.8
"""Weight of the past in the running mean: it is of about the last five updates."""

_MOST_SCORERS = 32
_LONGEST_SCORER = 100

_MEAN, _BEST = "reward_running_mean", "reward_best"
_COUNT_OF, _MEAN_OF, _VARIANCE_OF = "baseline_count.", "baseline_mean.", "baseline_variance."


class RewardMemory:
    """The running mean reward of the updates, its best so far, and each scorer's baseline for single samples.

    The mean is exponential: 0.8 of itself and 0.2 of an update's mean reward; the first update's is its beginning.
    Baselines are kept for the 32 scorers used last.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self.best: float | None = None
        self._baselines: dict[str, RunningBaseline] = {}

    def include(self, reward: float) -> bool:
        """Takes in one update's mean reward; whether the running mean is the best so far."""
        self.mean = reward if self.mean is None else _MEMORY * self.mean + (1 - _MEMORY) * reward
        best = self.best is None or self.mean > self.best
        if best:
            self.best = self.mean
        return best

    def fell_by(self, drop: float) -> bool:
        """Whether the running mean is so far under its best."""
        return self.mean is not None and self.best is not None and self.best - self.mean >= drop

    def restart(self) -> None:
        """The policy is another one: its rewards are not the old one's. Baselines are of scorers, and stay."""
        self.mean = self.best = None

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
        """What `restore` needs, as a checkpoint's metrics; a scorer of a very long name is left out."""
        metrics = {name: value for name, value in ((_MEAN, self.mean), (_BEST, self.best)) if value is not None}
        for scorer, baseline in self._baselines.items():
            if len(scorer) <= _LONGEST_SCORER and scorer.isprintable():
                metrics[_COUNT_OF + scorer] = float(baseline.count)
                metrics[_MEAN_OF + scorer] = baseline.mean
                metrics[_VARIANCE_OF + scorer] = baseline.variance
        return metrics

    def restore(self, metrics: Mapping[str, float]) -> None:
        self.mean, self.best = metrics.get(_MEAN), metrics.get(_BEST)
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
