"""GroupSelection: which complete groups the next update trains on, and when there are enough of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from mlx_parallm.config import ResolvedTraining
from mlx_parallm.rl.adapter_training import AdapterTraining
from mlx_parallm.rl.collect.buffer import TrajectoryBuffer
from mlx_parallm.rl.collect.groups import GroupMember, TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.objectives.batches import ScoredGroup, collected_group, group_without_signal

REFILLS = 3
"""An update that lacks trajectories with a signal waits for at most this many times the number that it wants."""


class GroupSelection:
    """Looks at the groups of one adapter when they become complete. Event loop's thread only.

    A group without a signal, such as one of equal rewards, cannot be trained on: it is dropped at once and does not
    count towards an update. Its rewards still count in the reward trend and in the metrics of the next update.
    """

    def __init__(self, training: AdapterTraining, buffer: TrajectoryBuffer, config: ResolvedTraining) -> None:
        self._training = training
        self._buffer = buffer
        self._wanted = config.update_frequency
        self._imitates = config.loss.imitates  # then every group has a signal
        self._without_signal: deque[ScoredGroup] = deque()  # dropped since the last update
        self._observed: set[str] = set()  # ids of ready groups that are in the reward trend

    @property
    def with_signal(self) -> int:
        """Trajectories that an update can take."""
        return sum(len(group.scored) for group in self._buffer.ready(self._training.name))

    @property
    def without_signal(self) -> int:
        """Trajectories dropped since the last update because their groups have no signal."""
        return sum(len(group.rewards) for group in self._without_signal)

    @property
    def enough(self) -> bool:
        """Whether an update is due: there is a whole batch, or it has waited long enough for one."""
        with_signal = self.with_signal
        return with_signal >= self._wanted or with_signal + self.without_signal >= (1 + REFILLS) * self._wanted

    def look(self) -> None:
        """Observes the rewards of groups that have become complete, and drops those without a signal."""
        if self._imitates:
            return
        for group in self._buffer.ready(self._training.name):
            known_version = self._training.versions.staleness(group.version) is not None
            if group.scorer is not None and group.group_id not in self._observed and known_version:
                self._look_at(group)
        self._observed &= {group.group_id for group in self._buffer.ready(self._training.name)}
        while self.without_signal > (1 + REFILLS) * self._wanted:  # training is paused
            self._without_signal.popleft()

    def _look_at(self, group: TrajectoryGroup) -> None:
        scored = self._scored(group, group.scored)
        self._observe(group, scored)
        if (reason := group_without_signal(group)) is not None:
            self._without_signal.append(scored)
            self._buffer.drop(group, reason)

    def take(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Starts over with the next update.

        Returns:
            The groups without a signal since the last update, and `groups`, which an update has taken.
        """
        taken = [self._scored(group, group.in_state(TrajectoryState.TRAINING)) for group in groups]
        for group, scored in zip(groups, taken, strict=True):
            if scored.rewards and group.group_id not in self._observed and not self._imitates:
                self._observe(group, scored)
        without_signal = [*self._without_signal]
        self.restart()
        return without_signal, taken

    def restart(self) -> None:
        """Forgets the groups that were dropped: the policy that drew them was replaced."""
        self._without_signal.clear()
        self._observed.clear()

    def _observe(self, group: TrajectoryGroup, scored: ScoredGroup) -> None:
        self._observed.add(group.group_id)
        current = scored.staleness == 0 and not self._training.unpublished
        self._training.rewards.trend.observe(scored.scorer, fmean(scored.rewards), current)

    def _scored(self, group: TrajectoryGroup, members: Sequence[GroupMember]) -> ScoredGroup:
        staleness = self._training.versions.staleness(group.version)
        assert staleness is not None  # otherwise the buffer was swept
        on_policy = staleness == 0 and not self._training.unpublished
        return collected_group(group, members, staleness, on_policy)
