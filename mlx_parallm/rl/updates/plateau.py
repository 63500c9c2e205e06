"""Plateau: notices that nearly all answers earn the same part of the reward, and keeps the best answers seen so far.

Groups whose rewards are all equal teach nothing. A policy that has learnt to earn a part of the reward with every
answer stays there, however many updates follow. See `objectives` for the way out.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Collection
from itertools import count

from mlx_parallm.config import PlateauConfig
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.objectives import ScoredGroup, token_deviation

_ALIKE = 0.9
"""Least share of the answers that earn the highest reward among them."""

_TOLERANCE = 1e-6
"""Rewards that differ by less are equal."""

_KEPT = 8
"""Answers that are kept to be learnt again."""

_PART = (
    "{share:.0%} of the last {answers} answers earned {level:.3g}, and none earned more: their rewards teach nothing. "
    "Reward what the better ones of them have, or give less for what all of them have."
)
_NOTHING = (
    "None of the last {answers} answers earned a reward, so there is nothing to learn from. Reward a part of what you "
    "want too, make the tasks easier, or show examples first."
)

_log = logging.getLogger(__name__)


class Plateau:
    """The rewards of the last answers of one adapter, and its best answers.

    Attributes:
        level: what nearly all of the last answers earn, while that is less than the full reward; None: they are on no
            plateau.
        rests: whether answers are not looked at.

    Args:
        per_update: the trajectories of a whole update.
    """

    def __init__(self, name: str, config: PlateauConfig, emit: Emit, per_update: Callable[[], int]) -> None:
        self.level: float | None = None
        self.rests = False
        self._name = name
        self._config = config
        self._emit = emit
        self._per_update = per_update
        self.restart()

    def restart(self) -> None:
        """Forgets everything. Call this when the policy or its task is replaced."""
        self._report(None)
        self._rewards: deque[float] = deque()
        self._best: list[tuple[float, int, ScoredGroup]] = []  # a heap, the worst first
        self._full = self._config.full_reward
        self._standing = 0  # answers since the plateau began
        self._numbers = count()

    def observe(self, group: ScoredGroup) -> None:
        """Takes note of the rewards of one group. Rewards of single tokens that differ end a plateau."""
        if self.rests:
            return
        if token_deviation(group.episodes):
            self._rewards.clear()
            self._report(None)
            return
        for episode, reward in zip(group.episodes, group.rewards, strict=True):
            self._rewards.append(reward)
            self._full = max(self._full, reward)
            kept = ScoredGroup((episode,), (reward,), group.scorer, remembered=True)
            heapq.heappush(self._best, (reward, next(self._numbers), kept))
            if len(self._best) > _KEPT:
                heapq.heappop(self._best)
        while len(self._rewards) > self._answers:
            self._rewards.popleft()
        self._report(self._found())
        self._standing = 0 if self.level is None else self._standing + len(group.rewards)

    @property
    def explores(self) -> bool:
        """Whether updates look for a way out. There is none to look for if no answer has ever earned anything; and if
        none is found in some updates, rewards may be the same whatever the answers are."""
        most = self._config.explore_updates * self._per_update()
        if self.level is None or not most or self._standing > most:
            return False
        return self.level > 0 or bool(self.better)

    @property
    def better(self) -> list[ScoredGroup]:
        """Answers that earned more than those of the plateau, each as a group, the best first."""
        level = self.level
        if level is None:
            return []
        return [kept for reward, _, kept in sorted(self._best, reverse=True) if reward > level + _TOLERANCE]

    @property
    def remembered_ids(self) -> list[str]:
        """The ids of the trajectories of the best answers so far, which an update may learn from again."""
        return [one for _, _, kept in self._best for one in _ids(kept)]

    def forget(self, trajectory_ids: Collection[str]) -> None:
        """Forgets the best answers that have one of these trajectories."""
        self._best = [each for each in self._best if _ids(each[2]).isdisjoint(trajectory_ids)]
        heapq.heapify(self._best)

    @property
    def advice(self) -> str:
        """What people can do about it; empty if there is no plateau."""
        if self.level is None:
            return ""
        text = _PART if self.level > 0 else _NOTHING
        return text.format(share=self._alike(self.level), answers=len(self._rewards), level=self.level)

    @property
    def _answers(self) -> int:
        return self._config.updates * self._per_update()

    def _found(self) -> float | None:
        if len(self._rewards) < self._answers:
            return None
        level = max(self._rewards)
        reaches = level >= self._full - _TOLERANCE
        return None if reaches or self._alike(level) < _ALIKE else level

    def _alike(self, level: float) -> float:
        return sum(reward >= level - _TOLERANCE for reward in self._rewards) / len(self._rewards)

    def _report(self, level: float | None) -> None:
        """Reports the beginning and the end of a plateau."""
        began, ended = self.level is None and level is not None, self.level is not None and level is None
        self.level = level
        if began:
            _log.warning("%s is on a plateau: %s", self._name, self.advice)
            self._emit("plateau", adapter=self._name, reward=level, reason=self.advice)
        elif ended:
            self._emit("plateau_ended", adapter=self._name)


def _ids(group: ScoredGroup) -> set[str]:
    turns = (turn for episode in group.episodes for turn in episode.turns)
    return {turn.trajectory_id for turn in turns if isinstance(turn, Trajectory)}
