"""RewardTrend: how good rewards are now, how good they were at best, and whether the difference is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

_NEWEST = 0.1
"""Weight of the newest group in a running mean, which so is of about the last ten groups."""

_NEWEST_NOISE = 0.05
"""The same for the noise: a fall that has begun must not pass for noise."""

_ENOUGH = 10
"""Groups of which a mean can be trusted; what is marked as best before that is provisional."""

_ERRORS = 6.0
"""A fall is at least so many standard errors of the mean. The best mean was picked from many, so it is a lucky one."""

_MOST_SCORERS = 32
_LONGEST_SCORER = 100

_MEAN, _BEST, _PREFIX = "reward_running_mean", "reward_best", "reward_"


@dataclass(frozen=True, slots=True)
class RunningReward:
    """One scorer's group means: exponentially weighted mean, and the variance of a single group's.

    That is half the mean square of successive differences (von Neumann 1941), which a change of level hardly moves.
    """

    count: float
    mean: float
    last: float
    noise: float

    @classmethod
    def starting_at(cls, reward: float) -> RunningReward:
        return cls(1, reward, reward, 0.0)

    def including(self, reward: float) -> RunningReward:
        mean = self.mean + max(1 / (self.count + 1), _NEWEST) * (reward - self.mean)
        noise = self.noise + max(1 / self.count, _NEWEST_NOISE) * ((reward - self.last) ** 2 / 2 - self.noise)
        return RunningReward(self.count + 1, mean, reward, noise)

    @property
    def squared_error(self) -> float:
        """Of the mean, which is a plain one while there are few groups."""
        return self.noise * max(1 / self.count, _NEWEST / (2 - _NEWEST))


class RewardTrend:
    """One observation is a group's mean reward, whether the group has a signal or not.

    Each scorer has a running mean of its own, and the mean of those is what is compared: traffic that moves from an
    easy task to a hard one is no fall. A new scorer begins the comparison anew. The 32 scorers used last count.
    """

    def __init__(self) -> None:
        self.best: float | None = None
        self._provisional = True
        self._current = False
        self._scorers: dict[str, RunningReward] = {}

    def observe(self, scorer: str, reward: float, current: bool) -> None:
        """Takes in the mean reward of one group. `current`: the version that is being trained drew it."""
        known = self._scorers.pop(scorer, None)
        self._scorers[scorer] = known.including(reward) if known else RunningReward.starting_at(reward)
        self._current |= current
        if known is None:
            self.forget_best()
        if len(self._scorers) > _MOST_SCORERS:
            del self._scorers[next(iter(self._scorers))]
            self.forget_best()

    @property
    def mean(self) -> float | None:
        """None: nothing was observed yet."""
        means = [scorer.mean for scorer in self._scorers.values()]
        return sum(means) / len(means) if means else None

    def mark_best(self) -> bool:
        """Whether the mean is the best so far, and the current version has a part in it; then it is remembered."""
        mean, current = self.mean, self._current
        self._current = False
        if mean is None or not current or not (self.best is None or self._provisional or mean > self.best):
            return False
        self.best = mean
        self._provisional = min(scorer.count for scorer in self._scorers.values()) < _ENOUGH
        return True

    def fell_by(self, drop: float) -> bool:
        """Whether the mean is so far below the best one, and by more than chance."""
        if self.mean is None or self.best is None or self._provisional:
            return False
        error = math.sqrt(sum(scorer.squared_error for scorer in self._scorers.values())) / len(self._scorers)
        return self.best - self.mean >= max(drop, _ERRORS * error)

    def forget_best(self) -> None:
        """The next mean that is marked is the best."""
        self.best = None

    # -- across restarts -------------------------------------------------------------------------

    def to_metrics(self) -> dict[str, float]:
        """What `of_metrics` needs, as a checkpoint's metrics; a scorer with a very long name is left out."""
        metrics = {} if self.mean is None else {_MEAN: self.mean}
        if self.best is not None and not self._provisional:
            metrics[_BEST] = self.best
        for name, running in self._scorers.items():
            if len(name) <= _LONGEST_SCORER and name.isprintable():
                metrics |= dict(zip(_keys(name), astuple(running), strict=True))
        return metrics

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> RewardTrend:
        trend = cls()
        for name in (key.removeprefix(_FIRST) for key in metrics if key.startswith(_FIRST)):
            trend._scorers[name] = RunningReward(*(metrics[key] for key in _keys(name)))
        if trend._scorers and _BEST in metrics:
            trend.best, trend._provisional = metrics[_BEST], False
        return trend


_NAMES = tuple(f"{_PREFIX}{field.name}." for field in fields(RunningReward))
_FIRST = _NAMES[0]


def _keys(scorer: str) -> list[str]:
    return [name + scorer for name in _NAMES]
