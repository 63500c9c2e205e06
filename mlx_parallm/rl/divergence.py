"""Divergence: watches the training of one adapter, and says when the figures of an update are beyond their limits.

metrics of an update ─┐
recent updates       ─┼─▶ rules ─▶ divergences ─▶ hold, pause, roll back
reward trend         ─┘                     └───▶ events, counts
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mlx_parallm.config import Action, DivergenceConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.rewards import RewardTrend
from mlx_parallm.rl.status import Divergence

RECENT = 8
"""Updates that the figures of the next one are compared with."""

_LEAST_RECENT = 3
"""Fewer updates have no median to compare with."""

_SHOWN = 8
"""Divergences that the status shows."""

_OF_POLICY = ("kl", "entropy", "length", "reward")
"""Signals of the policy that sampled the samples, which may stay beyond their limits for many updates. Those are
reported once, and training pauses for them once. The other signals are of one update, and each update is judged."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric of an update. `before`: of the update before it; None: there is none. `usual`: its median over recent
    updates; None: there are too few, or the rewards are no worse than theirs, and then what it was does not count."""

    value: float
    before: float | None
    usual: float | None


_RULES: tuple[tuple[str, str, Callable[[_Figure, float], bool], str], ...] = (
    (
        "kl_step",
        "kl_step",
        lambda kl, limit: kl.value > limit,
        "kl_step {value:.3g} is above {limit:g}: the update moved the policy too far",
    ),
    (
        "ratio",
        "ratio_mean",
        lambda ratio, limit: ratio.value > limit,
        "ratio_mean {value:.3g} is above {limit:g}: the policy has left the samples behind",
    ),
    (
        "ratio",
        "ratio_mean",
        lambda ratio, limit: not ratio.value >= 1 / limit,  # NaN is beyond it too
        "ratio_mean {value:.3g} is below {inverse:.3g}: the policy has left the samples behind",
    ),
    (
        "kl",
        "kl",
        lambda kl, limit: kl.before is not None and min(kl.before, kl.value) > limit,
        "kl was above {limit:g} in two updates: the policy is far from the base model",
    ),
    (
        "entropy",
        "entropy",
        lambda entropy, limit: entropy.usual is not None and entropy.value < limit * entropy.usual,
        "entropy {value:.3g} is below {limit:g} of what it was, {usual:.3g}",
    ),
    (
        "length",
        "completion_tokens",
        lambda tokens, limit: tokens.usual is not None and tokens.value > limit * tokens.usual,
        "completion_tokens {value:.3g} is above {limit:g} times what it was, {usual:.3g}",
    ),
)
"""For each rule: its signal, whose limit and action are configured; the metric that it reads; whether the metric is
beyond the limit; and the message."""


class DivergenceWatch:
    """Judges the updates of one adapter by the rules, and counts and reports what it finds. `judge` and `judge_rewards`
    change nothing, and may be called on the device thread.

    A signal without a limit, or whose metric the update lacks, is not judged. Signals that are compared with recent
    updates are not judged before there are three of them. Only updates of a loss that `compares` the policy's own
    samples are: otherwise numbers that are not finite count alone, since all else is of samples that somebody else may
    have sampled.

    Attributes:
        counts: divergences by signal and action.
        newest: the last divergences, oldest first.

    Args:
        can_roll_back: says whether there is another version to go back to.
    """

    def __init__(self, name: str, config: DivergenceConfig, emit: Emit, can_roll_back: Callable[[], bool]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.newest: deque[Divergence] = deque(maxlen=_SHOWN)
        self._name = name
        self._config = config
        self._emit = emit
        self._can_roll_back = can_roll_back
        self._limits = {signal: getattr(config, signal) for signal, *_ in _RULES}
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT)
        self._standing: set[str] = set()

    def restart(self, recent: Iterable[Mapping[str, float]] = ()) -> None:
        """Call this when the policy is replaced. `recent`: metrics of the updates that led to it, oldest first. Those
        without rewards, which imitate, are left out."""
        self._recent = deque((metrics for metrics in recent if "reward_mean" in metrics), maxlen=RECENT)
        self._standing.clear()

    def judge(self, metrics: Mapping[str, float], compares: bool = True, skipped: str = "") -> tuple[Divergence, ...]:
        """What has diverged in an update. `skipped`: why the update changed nothing, or ""."""
        found = [*self._not_finite(metrics, skipped), *(self._beyond(metrics) if compares else ())]
        return self._possible(tuple(each for each in found if each.signal not in self._standing))

    def judge_rewards(self, trend: RewardTrend) -> Divergence | None:
        """Whether the rewards have collapsed since the last report of it."""
        reward = self._config.reward
        if reward.limit is None or "reward" in self._standing or not trend.fell_by(reward.limit):
            return None
        fall = (trend.best or 0.0) - (trend.mean or 0.0)
        found = _found("reward", fall, reward.limit, reward.action, f"the running mean reward fell by {fall:.3g}")
        return self._possible((found,))[0]

    def observe(self, metrics: Mapping[str, float], compares: bool = True) -> None:
        """Takes note of an update after it was judged."""
        if not compares:
            return
        beyond = (found for found in self._beyond(metrics) if found.action in (Action.TELL, Action.PAUSE))
        rewards = self._standing & {"reward"}
        self._standing = rewards | {found.signal for found in beyond if found.signal in _OF_POLICY}

    def accept(self, metrics: Mapping[str, float], compares: bool = True) -> None:
        """Adds an update that has changed the policy to the recent ones."""
        if compares:
            self._recent.append(metrics)

    def report(self, found: Sequence[Divergence], trend: RewardTrend, live: AdapterRef | None, step: int) -> None:
        """Reports what was found. `live`: the live version. `step`: optimizer steps of the policy."""
        limit = self._config.reward.limit
        if limit is not None and trend.fell_by(limit):
            self._standing.add("reward")
        else:
            self._standing.discard("reward")
        for each in found:
            self.counts[each.signal, each.action] += 1
            self.newest.append(each)
            _log.warning("%s diverges (%s): %s", self._name, each.action, each.reason)
            self._emit(
                "divergence",
                adapter=self._name,
                version=str(live) if live else None,
                step=step,
                signal=each.signal,
                value=each.value,
                limit=each.limit,
                action=each.action,
                reason=each.reason,
            )

    def _possible(self, found: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
        return found if self._can_roll_back() else without_rollback(found)

    # -- rules -----------------------------------------------------------------------------------

    def _not_finite(self, metrics: Mapping[str, float], skipped: str) -> Iterator[Divergence]:
        names = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        what = skipped.removesuffix("_not_finite") if skipped.endswith("_not_finite") else ", ".join(names)
        if what:
            yield _found("not_finite", math.nan, None, self._config.not_finite.action, f"not finite: {what}")

    def _beyond(self, metrics: Mapping[str, float]) -> Iterator[Divergence]:
        is_as_good = self._is_as_good(metrics)
        for signal, metric, is_beyond, reason in _RULES:
            rule, value = self._limits[signal], metrics.get(metric)
            if rule.limit is None or value is None:
                continue
            before = self._recent[-1].get(metric, 0.0) if self._recent else None
            figure = _Figure(value, before, None if is_as_good else self._usual(metric))
            if is_beyond(figure, rule.limit):
                text = reason.format(value=value, limit=rule.limit, inverse=1 / rule.limit, usual=figure.usual)
                yield _found(signal, value, rule.limit, rule.action, text)

    def _is_as_good(self, metrics: Mapping[str, float]) -> bool:
        """Whether the rewards are no worse than in most recent updates. Without rewards (imitation) that is unknown,
        and counts as if they were not."""
        reward, usual = metrics.get("reward_mean"), self._usual("reward_mean")
        return reward is None or usual is None or reward >= usual

    def _usual(self, name: str) -> float | None:
        """The median of a metric over recent updates; None if too few of them have it."""
        values = [update[name] for update in self._recent if name in update]
        return median(values) if len(values) >= _LEAST_RECENT else None


def _found(signal: str, value: float, limit: float | None, action: str, reason: str) -> Divergence:
    return Divergence(signal, value, limit, str(action), reason, time.time())


def without_rollback(found: Sequence[Divergence]) -> tuple[Divergence, ...]:
    """What is done if there is no other version to go back to: the update is held. Rewards are not of an update, so
    a fall of them is only reported."""
    instead = {each.signal: Action.TELL if each.signal == "reward" else Action.HOLD for each in found}
    return tuple(
        replace(each, action=str(instead[each.signal])) if each.action == Action.ROLL_BACK else each for each in found
    )
