"""DivergenceWatch: watches the training of one adapter, and reports what has diverged."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlx_parallm.config import DivergenceConfig, ResolvedLoss
from mlx_parallm.core import AdapterRef, Divergence
from mlx_parallm.rl.divergence.limits import DivergenceRules, without_rollback
from mlx_parallm.rl.events import Emit, UpdateOutcome
from mlx_parallm.rl.objectives.rewards import RewardTrend

_SHOWN = 8
"""Divergences that the status shows."""

_log = logging.getLogger(__name__)


class DivergenceWatch:
    """Judges updates and rewards by the rules. It counts its findings by signal and action, and emits events.

    Attributes:
        counts: divergences by signal and action.
        newest: the last divergences, oldest first.

    Args:
        can_roll_back: says whether there is another version to go back to.
    """

    def __init__(self, name: str, config: DivergenceConfig, emit: Emit, can_roll_back: Callable[[], bool]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.newest: deque[Divergence] = deque(maxlen=_SHOWN)
        self._rules = DivergenceRules(config)
        self._name = name
        self._emit = emit
        self._can_roll_back = can_roll_back

    def restart(self, recent: Iterable[Mapping[str, float]] = ()) -> None:
        """See `DivergenceRules.restart`."""
        self._rules.restart(recent)

    def judge(self, loss: ResolvedLoss, again: bool, outcome: UpdateOutcome) -> tuple[Divergence, ...]:
        """What has diverged in an update. One that is made `again` was accepted before. It may be called on the device
        thread while the update is made."""
        return () if again else self._possible(self._rules.judge(outcome.metrics, loss.compares, outcome.skipped))

    def judge_rewards(self, trend: RewardTrend) -> Divergence | None:
        """Whether the rewards have collapsed since the last report of it."""
        found = self._rules.judge_rewards(trend)
        return self._possible((found,))[0] if found else None

    def observe(self, loss: ResolvedLoss, outcome: UpdateOutcome) -> None:
        """Takes note of an update after it was judged."""
        self._rules.observe(outcome.metrics, loss.compares)

    def accept(self, loss: ResolvedLoss, outcome: UpdateOutcome) -> None:
        """Takes note of an update that has changed the policy."""
        self._rules.accept(outcome.metrics, loss.compares)

    def tell(self, found: Sequence[Divergence], trend: RewardTrend, live: AdapterRef | None, step: int) -> None:
        """Reports what was found. `live`: the live version. `step`: optimizer steps of the policy."""
        self._rules.observe_rewards(trend)
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
