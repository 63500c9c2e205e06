"""What training remembers of rewards between updates, for each scorer: their trend, a baseline, and a range.

The trend says how good rewards are now, how good they were at best, and whether a fall is more than noise. The baseline
is what a reward is compared with if its sample has no group. The range says which differences within a group are small.
All are saved in the metrics of checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from mlx_parallm.rl.trajectories import FEEDBACK

_MAX_SCORERS = 32
_MAX_SCORER_NAME = 100
"""Characters. A scorer with a longer name is not saved in checkpoints."""

# ---- baselines -----------------------------------------------------------------------------------

_BASELINE_WEIGHT = 0.05
"""Least weight of the newest reward in a baseline."""

_BASELINE_EPSILON = 0.01
"""Added to a baseline's standard deviation, which can shrink to nothing over many equal rewards."""

_MOST_DEVIATIONS = 4.0
"""A reward that is further than this from the mean counts as that far, so that a single one cannot move a running mean
beyond all others."""


@dataclass(frozen=True, slots=True)
class RunningBaseline:
    """Exponentially weighted mean and variance of one scorer's rewards (T. Finch, "Incremental calculation of weighted
    mean and variance", 2009).

    The first rewards have equal weight, as in a plain mean; each later one has weight 0.05, so the mean follows about
    the last 20 rewards.
    """

    count: float
    mean: float
    variance: float

    @classmethod
    def starting_at(cls, reward: float) -> RunningBaseline:
        return cls(1, reward, 0.0)

    def advantage(self, reward: float, scaled: bool) -> float:
        """`reward` minus the mean of the rewards before it.

        `scaled`: the difference, of 4 standard deviations at most, is divided by the standard deviation of all rewards,
        `reward` included, + 0.01. Then its absolute value is at most 1 / √(0.05 · 0.95) = 4.6.
        """
        if not scaled:
            return reward - self.mean
        return self._centred(reward) / (math.sqrt(self.including(reward).variance) + _BASELINE_EPSILON)

    def including(self, reward: float) -> RunningBaseline:
        weight = max(1 / (self.count + 1), _BASELINE_WEIGHT)
        centred = self._centred(reward)
        variance = (1 - weight) * (self.variance + weight * centred**2)
        return RunningBaseline(self.count + 1, self.mean + weight * centred, variance)

    def _centred(self, reward: float) -> float:
        """`reward` minus the mean, and no further from it than rewards were so far. Rewards that were all equal say
        nothing of how far that is."""
        most = _MOST_DEVIATIONS * (math.sqrt(self.variance) + _BASELINE_EPSILON) if self.variance else math.inf
        return min(max(reward - self.mean, -most), most)


FEEDBACK_BASELINE = RunningBaseline(1, 0.5, 0.25)
"""Where the baseline of feedback starts: as if people had given 0 and 1 equally often. So the first thumbs-up (1) has a
positive advantage, and the first thumbs-down (0 or -1) a negative one."""


# ---- ranges ----------------------------------------------------------------------------------------

_FAR = 50
"""An update whose range is wider or narrower by this factor votes against a running range, and does not move it."""

_SUPPORT, _MOST_VOTES = 2, 100
"""Votes that each other update adds, so that a running range is replaced if more than two in three are far from it; and
how many count."""

_NARROWING, _WIDENING = 0.99, 1.02
"""Factors by which one update moves a running range at most. So it widens if more than one in three is wider."""


@dataclass(frozen=True, slots=True)
class RunningRange:
    """A wide range of rewards within a group, of one scorer in recent updates. 0 before the first of them.

    It is no maximum and no mean, since one reward of 10,000 among 0 and 1 would make all other differences look small:
    of each update, the range that a quarter of its groups exceed counts. It moves this one by a small factor or, if it
    is far from it, votes against it (Boyer and Moore 1991, "MJRTY"): without votes, it is replaced.
    """

    width: float = 0.0
    votes: float = 0.0

    def including(self, widths: Sequence[float]) -> RunningRange:
        """`widths`: of the groups of one update, at least one; all above 0."""
        wide = sorted(widths)[3 * (len(widths) - 1) // 4]
        if self.width / _FAR <= wide <= self.width * _FAR:
            wide = min(max(wide, _NARROWING * self.width), _WIDENING * self.width)
            return RunningRange(wide, min(self.votes + _SUPPORT, _MOST_VOTES))
        return RunningRange(self.width, self.votes - 1) if self.votes else RunningRange(wide, _SUPPORT)


# ---- trend ---------------------------------------------------------------------------------------

_MEAN_WEIGHT = 0.1
"""Weight of the newest group in a running mean, which therefore covers about the last ten groups."""

_NOISE_WEIGHT = 0.01
"""Weight of the newest group in the noise estimate. It is small, so that the start of a fall is not taken for noise,
and that the estimate is seldom far too low."""

_TRUSTED_GROUPS = 10
"""A best mean of fewer groups is provisional: the next mean replaces it, and no fall is measured from it."""

_CURRENT = "reward_is_current"

_STANDARD_ERRORS = 8.0
"""A fall is at least this many standard errors of the mean. After thousands of updates, the best mean is some four
above the level by luck, and now and then a mean is as far below it."""


@dataclass(frozen=True, slots=True)
class RunningReward:
    """Exponentially weighted mean of one scorer's group means, and the variance (`noise`) of a single group mean.

    The variance is half the mean square of successive differences (von Neumann 1941), which hardly reacts to a change
    of level. A group mean counts as at most 4 standard deviations better than the one before it. Otherwise one that is
    far too good would become the best mean, and what follows would look like a fall. A bad one counts as it is.
    """

    count: float
    mean: float
    last: float
    noise: float

    def including(self, reward: float) -> RunningReward:
        if self.noise:
            reward = min(reward, self.last + _MOST_DEVIATIONS * (math.sqrt(self.noise) + _BASELINE_EPSILON))
        mean = self.mean + max(1 / (self.count + 1), _MEAN_WEIGHT) * (reward - self.mean)
        noise = self.noise + max(1 / self.count, _NOISE_WEIGHT) * ((reward - self.last) ** 2 / 2 - self.noise)
        return RunningReward(self.count + 1, mean, reward, noise)

    @property
    def squared_error(self) -> float:
        """Squared standard error of the mean."""
        return self.noise * max(1 / self.count, _MEAN_WEIGHT / (2 - _MEAN_WEIGHT))


class RewardTrend:
    """Running mean reward of an adapter, its best value so far, and whether it fell.

    One observation is the mean reward of one group that an update takes, or that is dropped because it has no signal.
    Each scorer has a running mean of its own, and the mean of these is compared with its best value: traffic that moves
    from an easy task to a hard one is not a fall. A new scorer restarts the comparison. Only the 32 scorers that were
    used last count.

    Attributes:
        has_current: whether a group that the version in training sampled is complete since the last `mark_best`.
    """

    def __init__(self) -> None:
        self.best: float | None = None
        self.provisional = True
        self.has_current = False
        self.scorers: dict[str, RunningReward] = {}  # the one used last comes last

    def observe(self, scorer: str, reward: float, current: bool) -> None:
        """Adds the mean reward of one group. `current`: the version in training sampled it."""
        known = self.scorers.pop(scorer, None)
        self.scorers[scorer] = known.including(reward) if known else RunningReward(1, reward, reward, 0.0)
        self.has_current |= current
        if known is None:
            self.forget_best()
        if len(self.scorers) > _MAX_SCORERS:
            del self.scorers[next(iter(self.scorers))]
            self.forget_best()

    @property
    def mean(self) -> float | None:
        """None before the first observation."""
        means = [scorer.mean for scorer in self.scorers.values()]
        return sum(means) / len(means) if means else None

    def mark_best(self) -> bool:
        """Stores the mean if it is the best one and the current version contributed to it. Returns whether it did."""
        mean, has_current = self.mean, self.has_current
        self.has_current = False
        if mean is None or not has_current or not (self.best is None or self.provisional or mean > self.best):
            return False
        self.best = mean
        self.provisional = min(scorer.count for scorer in self.scorers.values()) < _TRUSTED_GROUPS
        return True

    def fell_by(self, drop: float) -> bool:
        """Whether the mean is at least `drop` below the best one, and by more than chance explains."""
        if self.mean is None or self.best is None or self.provisional:
            return False
        error = math.sqrt(sum(scorer.squared_error for scorer in self.scorers.values())) / len(self.scorers)
        return self.best - self.mean >= max(drop, _STANDARD_ERRORS * error)

    def observed(self) -> dict[str, float]:
        """What `continue_from` needs: the running means, and whether the current version contributed to them."""
        return _figures("reward", self.scorers) | {_CURRENT: float(self.has_current)}

    def continue_from(self, observed: Mapping[str, float]) -> None:
        """Continues as if all that another trend has `observed` had been observed here."""
        known, self.scorers = self.scorers, _restored("reward", RunningReward, observed)
        self.has_current = bool(observed[_CURRENT])
        if known.keys() != self.scorers.keys():
            self.forget_best()

    def forget_best(self) -> None:
        """Forgets the best mean, so that the next mean that is marked becomes the best one."""
        self.best = None


def comparison_key(text: str) -> float:
    """A whole number for the metrics of checkpoints. It is equal for equal texts, which say on what rewards depend."""
    return float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))


# ---- all of them ----------------------------------------------------------------------------------------

_BEST = "reward_best"

R = TypeVar("R", RunningReward, RunningBaseline, RunningRange)


class RewardHistory:
    """The trend of an adapter's rewards, and the baselines and ranges of the 32 scorers used last."""

    def __init__(self) -> None:
        self.trend = RewardTrend()
        self._baselines: dict[str, RunningBaseline] = {}
        self._ranges: dict[str, RunningRange] = {}

    def restart(self) -> None:
        """Starts a new trend. Call this when the policy is replaced. The others belong to scorers, and stay."""
        self.trend = RewardTrend()

    def draft(self) -> RewardHistory:
        """A history with the same baselines and ranges, for an update that may not be accepted; see `accept`. Its
        trend stays as it is now."""
        draft = RewardHistory()
        draft.trend.continue_from(self.trend.observed())
        draft._baselines, draft._ranges = dict(self._baselines), dict(self._ranges)
        return draft

    def accept(self, draft: RewardHistory) -> bool:
        """Takes over the baselines and ranges of a draft. Returns whether they had moved."""
        moved = (self._baselines, self._ranges) != (draft._baselines, draft._ranges)
        self._baselines, self._ranges = draft._baselines, draft._ranges
        return moved

    def advantage(self, scorer: str, reward: float, scaled: bool = False) -> float | None:
        """The advantage of a sample without a group over the scorer's earlier rewards. Then adds `reward` to these.

        None: it is the scorer's first reward, so there is nothing to compare it with. Feedback has a baseline from the
        start (`FEEDBACK_BASELINE`).
        """
        baseline = self._baselines.pop(scorer, FEEDBACK_BASELINE if scorer == FEEDBACK else None)
        self._baselines[scorer] = baseline.including(reward) if baseline else RunningBaseline.starting_at(reward)
        if len(self._baselines) > _MAX_SCORERS:
            del self._baselines[next(iter(self._baselines))]
        return baseline.advantage(reward, scaled) if baseline else None

    def ranges(self, groups: Sequence[tuple[str, float]]) -> list[float]:
        """Adds the groups of one update, each with its scorer and the range of its rewards. Returns for each the
        `RunningRange.width` of its scorer. Groups of equal rewards change nothing."""
        of_update: dict[str, list[float]] = {}
        for scorer, width in groups:
            if width:
                of_update.setdefault(scorer, []).append(width)
        for scorer, widths in of_update.items():
            self._ranges[scorer] = self._ranges.pop(scorer, RunningRange()).including(widths)
        seen = [self._ranges.get(scorer, RunningRange()).width for scorer, _ in groups]
        while len(self._ranges) > _MAX_SCORERS:
            del self._ranges[next(iter(self._ranges))]
        return seen

    def to_metrics(self) -> dict[str, float]:
        """What `restore` needs after a restart, to be saved in a checkpoint's metrics."""
        trend = self.trend
        metrics = {} if trend.mean is None else {"reward_running_mean": trend.mean}
        if trend.best is not None and not trend.provisional:
            metrics[_BEST] = trend.best
        return metrics | _figures("reward", trend.scorers) | self.baselines()

    def baselines(self) -> dict[str, float]:
        """What `restore_baselines` needs."""
        return _figures("baseline", self._baselines) | _figures("range", self._ranges)

    def restore(self, metrics: Mapping[str, float]) -> None:
        """Continues from what `to_metrics` returned."""
        self.trend = RewardTrend()
        self.trend.scorers = _restored("reward", RunningReward, metrics)
        if self.trend.scorers and _BEST in metrics:
            self.trend.best, self.trend.provisional = metrics[_BEST], False
        self.restore_baselines(metrics)

    def restore_baselines(self, metrics: Mapping[str, float]) -> None:
        self._baselines = _restored("baseline", RunningBaseline, metrics)
        self._ranges = _restored("range", RunningRange, metrics)


def _figures(prefix: str, scorers: Mapping[str, R]) -> dict[str, float]:
    return {
        f"{prefix}_{name}.{scorer}": float(value)
        for scorer, running in scorers.items()
        if len(scorer) <= _MAX_SCORER_NAME and scorer.isprintable()
        for name, value in asdict(running).items()
    }


def _restored(prefix: str, kind: type[R], metrics: Mapping[str, float]) -> dict[str, R]:
    """The running figures of each scorer. A scorer is left out if one of its figures is missing."""
    first = f"{prefix}_{fields(kind)[0].name}."
    restored = {}
    for scorer in (key.removeprefix(first) for key in metrics if key.startswith(first)):
        keys = {field.name: f"{prefix}_{field.name}.{scorer}" for field in fields(kind)}
        if metrics.keys() >= set(keys.values()):
            restored[scorer] = kind(**{name: metrics[key] for name, key in keys.items()})
    return restored
