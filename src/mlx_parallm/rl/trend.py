"""RewardTrend: how good rewards are now, how good they were at best, and whether the difference is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlx_parallm.rl.advantages import PEOPLE, RunningBaseline

_NEWEST = 0.1
"""Weight of the newest group: a running mean is of about the last ten groups."""

_ENOUGH = 4
"""Groups of which a mean can be trusted; what is marked as best before that is provisional."""

_ERRORS = 4.0
"""A fall is at least so many standard errors of the best mean."""

_MOST_SCORERS = 32

_LONGEST_SCORER = 100

_MEAN, _BEST, _ERROR = "reward_running_mean", "reward_best", "reward_best_error"
_COUNT, _MEAN_OF, _VARIANCE = "count.", "mean.", "variance."


class RewardTrend:
    """One observation is a group's mean reward, whether the group has a signal or not.

    Each scorer has a running mean of its own, and the mean of those is what is compared: traffic that moves from an
    easy task to a hard one is no fall. A new scorer begins the comparison anew. The 32 scorers used last count.
    """

    def __init__(self) -> None:
        self.best: float | None = None
        self._best_error = 0.0
        self._provisional = True
        self._current = False
        self._scorers: dict[str, RunningBaseline] = {}

    def observe(self, scorer: str, reward: float, current: bool) -> None:
        """Takes in the mean reward of one group. `current`: the version that is being trained drew it."""
        known = self._scorers.pop(scorer, None)
        self._scorers[scorer] = known.including(reward, _NEWEST) if known else RunningBaseline.starting_at(reward)
        self._current |= current
        if known is None:
            self.best = None
        if len(self._scorers) > _MOST_SCORERS:
            del self._scorers[next(iter(self._scorers))]
            self.best = None

    @property
    def mean(self) -> float | None:
        """None: nothing was observed yet."""
        means = [scorer.mean for scorer in self._scorers.values()]
        return sum(means) / len(means) if means else None

    @property
    def _error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(sum(map(_squared_error, self._scorers.values()))) / len(self._scorers)

    def mark_best(self) -> bool:
        """Whether the mean is the best so far, and the current version has a part in it; then it is remembered."""
        mean, current = self.mean, self._current
        self._current = False
        if mean is None or not current or not (self.best is None or self._provisional or mean > self.best):
            return False
        self.best, self._best_error = mean, self._error
        self._provisional = min(scorer.count for scorer in self._scorers.values()) < _ENOUGH
        return True

    def fell_by(self, drop: float) -> bool:
        """Whether the mean is so far below the best one, and by more than chance."""
        if self.mean is None or self.best is None or self._provisional:
            return False
        return self.best - self.mean >= max(drop, _ERRORS * self._best_error)

    def forget_best(self) -> None:
        """The next mean that is marked is the best."""
        self.best = None

    # -- across restarts -------------------------------------------------------------------------

    def to_metrics(self) -> dict[str, float]:
        """What `of_metrics` needs, as a checkpoint's metrics."""
        metrics = {} if self.mean is None else {_MEAN: self.mean}
        if self.best is not None and not self._provisional:
            metrics |= {_BEST: self.best, _ERROR: self._best_error}
        return metrics | running_to_metrics("reward_", self._scorers)

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> RewardTrend:
        trend = cls()
        trend._scorers = running_of_metrics("reward_", metrics)
        if trend._scorers and _ERROR in metrics:
            trend.best, trend._best_error, trend._provisional = metrics[_BEST], metrics[_ERROR], False
        return trend


def running_to_metrics(prefix: str, scorers: Mapping[str, RunningBaseline]) -> dict[str, float]:
    """Running figures by scorer, as metrics; a scorer with a very long name is left out."""
    metrics: dict[str, float] = {}
    for scorer, running in scorers.items():
        if len(scorer) <= _LONGEST_SCORER and scorer.isprintable():
            metrics |= {prefix + _COUNT + scorer: float(running.count), prefix + _MEAN_OF + scorer: running.mean}
            metrics[prefix + _VARIANCE + scorer] = running.variance
    return metrics


def running_of_metrics(prefix: str, metrics: Mapping[str, float]) -> dict[str, RunningBaseline]:
    """What `running_to_metrics` made metrics of."""
    counts, means, variances = prefix + _COUNT, prefix + _MEAN_OF, prefix + _VARIANCE
    scorers = [name.removeprefix(counts) for name in metrics if name.startswith(counts)]
    return {
        scorer: RunningBaseline(
            int(metrics[counts + scorer]),
            metrics[means + scorer],
            metrics.get(variances + scorer, PEOPLE.variance),  # older checkpoints lack it
        )
        for scorer in scorers
        if means + scorer in metrics
    }


def _squared_error(running: RunningBaseline) -> float:
    """Of a mean in which the newest observation weighs `_NEWEST`, or of a plain mean while there are few."""
    return running.variance * max(1 / running.count, _NEWEST / (2 - _NEWEST))
