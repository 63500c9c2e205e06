"""What an update trains on: the collected groups, when there are enough of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from mlx_parallm.config import LossKind, ResolvedTraining
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.objectives.batches import ScoredGroup
from mlx_parallm.rl.objectives.episodes import episode_of
from mlx_parallm.rl.trajectories import FEEDBACK, DropReason, GroupKey, GroupMember, TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.updates.adapter_training import AdapterTraining

REFILLS = 3
"""An update that wants N trajectories is due at the latest after (1 + REFILLS) N of them, with or without a signal."""


class GroupSelection:
    """Looks at the groups of one adapter when they become complete. Event loop's thread only.

    A group without a signal, such as one of equal rewards, cannot be trained on: it is dropped at once and does not
    count towards an update. Its rewards still count in the reward trend and in the metrics of the next update.

    The reward trend gets the rewards of a group when it is dropped for that, or when an update takes it. So groups that
    wait, which a restart of the server finds again, are not in the trend yet.
    """

    def __init__(self, training: AdapterTraining, buffer: TrajectoryBuffer, config: ResolvedTraining) -> None:
        self._training = training
        self._buffer = buffer
        self._imitates = config.loss.kind is LossKind.SFT  # then every group has a signal
        self._is_taught = config.loss.reads_teacher  # so too, and rewards are only observed
        self._compares = config.loss.reads_advantages
        self._threshold = config.loss.imitation_threshold
        self._without_signal: dict[GroupKey, ScoredGroup] = {}  # dropped since the last update, oldest first

    @property
    def with_signal(self) -> int:
        """Trajectories that an update can take."""
        return sum(len(group.scored) for group in self._buffer.ready(self._training.name))

    @property
    def without_signal(self) -> int:
        """Trajectories dropped since the last update because their groups have no signal."""
        return sum(len(group.rewards) for group in self._without_signal.values())

    @property
    def enough(self) -> bool:
        """Whether an update is due: there is a whole batch, or so many groups had no signal that it waits no longer."""
        with_signal, wanted = self.with_signal, self._training.pace.trajectories
        return with_signal >= wanted or with_signal + self.without_signal >= (1 + REFILLS) * wanted

    @property
    def explores(self) -> bool:
        """Whether the next update looks for a way out of a plateau. Then groups of equal rewards have a signal too."""
        return self._compares and self._training.plateau.explores

    def look(self) -> None:
        """Looks at groups that have become complete, and drops those without a signal."""
        if self._imitates:
            return
        for group in self._buffer.ready(self._training.name):
            if group.scorer is None or group.seen or self._staleness(group) is None:
                continue
            scored, group.seen = self._scored(group, group.scored), True
            self._training.rewards.trend.has_current |= scored.on_policy
            self._observe_plateau(scored)
            if self._is_taught or self.explores or not scored.is_compared:
                continue
            if reason := scored.no_signal:
                self._observe(scored)
                self._without_signal[group.key] = scored
                self._buffer.drop(group, reason)
        while self.without_signal > (1 + REFILLS) * self._training.pace.trajectories:  # training is paused
            del self._without_signal[next(iter(self._without_signal))]

    def take(
        self, groups: Sequence[TrajectoryGroup], chosen: Callable[[str], bool] = lambda _: True
    ) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Gives the groups of an update with their rewards, and starts to count for the next one.

        If the loss imitates, trajectories with a low reward are dropped.

        Args:
            chosen: which groups without a signal count for this update, by their ids. The others count for a later one.

        Returns:
            The groups without a signal since the last update, and `groups`, which an update has taken.
        """
        if self._imitates:
            for group in groups:
                self._drop_low(group)
        taken = [self._scored(group, group.in_state(TrajectoryState.TRAINING)) for group in groups]
        for group, scored in zip(groups, taken, strict=True):
            if not group.observed:
                self._observe(scored)
                if not group.seen:
                    self._observe_plateau(scored)
            group.observed = False
        counted = [key for key in self._without_signal if chosen(key[1])]
        without_signal = [self._without_signal.pop(key) for key in counted]
        return without_signal, taken

    def restart(self) -> None:
        """Call this when the policy was replaced. Groups that were dropped no longer count, and those that wait in the
        buffer count in the new reward trend."""
        self.forget()
        for group in self._buffer.ready(self._training.name):
            group.seen = group.observed = False

    def forget(self) -> None:
        """Groups that were dropped no longer count towards an update."""
        self._without_signal.clear()

    def _staleness(self, group: TrajectoryGroup) -> int | None:
        """How many versions were published since the oldest of those that drew the group; None: training does not
        continue from one of them. A group that was given counts as new."""
        staleness = [self._training.versions.staleness(version) for version in group.versions]
        return None if None in staleness else max(filter(None, staleness), default=0)

    def _drop_low(self, group: TrajectoryGroup) -> None:
        taken = group.in_state(TrajectoryState.TRAINING)
        low = [member for member in taken if member.reward is not None and member.reward <= self._threshold]
        self._buffer.drop(group, DropReason.LOW_REWARD, low)

    def _scored(self, group: TrajectoryGroup, members: Sequence[GroupMember]) -> ScoredGroup:
        staleness = self._staleness(group)
        assert staleness is not None  # otherwise the buffer was swept
        from_feedback = group.scorer is None or all(member.from_feedback for member in members)
        return ScoredGroup(
            tuple(map(episode_of, members)),
            tuple(member.reward for member in members if member.reward is not None),
            group.scorer if group.scorer and not from_feedback else FEEDBACK,
            staleness,
            on_policy=staleness == 0 and not self._training.unpublished and not group.was_given,
        )

    def _observe(self, scored: ScoredGroup) -> None:
        """Adds the rewards of a group to the reward trend."""
        if scored.rewards and not self._imitates:
            self._training.rewards.trend.observe(scored.scorer, fmean(scored.rewards), scored.on_policy)

    def _observe_plateau(self, scored: ScoredGroup) -> None:
        if scored.rewards and self._compares and len(scored.rewards) == len(scored.episodes):
            self._training.plateau.observe(scored)
