"""GroupSelection: what the next update of an adapter learns from, and whether enough of it waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from mlx_parallm.config import LossKind, ResolvedTraining
from mlx_parallm.core.requests import Signal
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.objectives import ScoredGroup
from mlx_parallm.rl.trajectories import FEEDBACK, DropReason, GroupKey, GroupMember, TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.updates.adapter_training import AdapterTraining

REFILLS = 3
"""An update that wants N trajectories is due at the latest after (1 + REFILLS) N of them, with or without a signal."""

Chosen = Callable[[str], bool]
"""Whether an update takes the group of this id."""

_SIGNALS = tuple(Signal)


class GroupSelection:
    """Looks at the groups of one adapter when they become complete, and takes them for updates. Event loop's thread
    only.

    All groups of one update have the same signal, because each signal has a loss of its own. Signals of which enough
    waits alternate.

    A group without a learning signal, such as one of equal rewards, cannot be trained on: it is dropped at once and
    does not count towards an update. Its rewards still count in the reward trend and in the metrics of the next update.

    The reward trend gets the rewards of a group when it is dropped for that, or when an update takes it. So groups that
    wait, which a restart of the server finds again, are not in the trend yet.
    """

    def __init__(self, training: AdapterTraining, buffer: TrajectoryBuffer, config: ResolvedTraining) -> None:
        self._training = training
        self._buffer = buffer
        self._people = config.people
        self._imitates = config.loss.kind is LossKind.SFT  # then every group has a signal
        self._is_taught = config.loss.reads_teacher  # so too, and rewards are only observed
        self._compares = config.loss.reads_advantages
        self._threshold = config.loss.imitation_threshold
        self._without_signal: dict[GroupKey, ScoredGroup] = {}  # dropped since the last update, oldest first
        self._last = _SIGNALS[-1]  # the signal of the last automatic update

    # -- is an update due? -----------------------------------------------------------------------

    @property
    def with_signal(self) -> int:
        """Trajectories that an update of rewards can take."""
        return sum(len(group.scored) for group in self._ready(Signal.REWARDS))

    @property
    def without_signal(self) -> int:
        """Trajectories dropped since the last update because all answers of their group have the same reward."""
        return sum(len(group.rewards) for group in self._without_signal.values())

    @property
    def enough(self) -> bool:
        """Whether an update of rewards is due: there is a whole batch, or so many groups had no signal that it waits no
        longer."""
        with_signal, wanted = self.with_signal, self.wanted(Signal.REWARDS)
        return with_signal >= wanted or with_signal + self.without_signal >= (1 + REFILLS) * wanted

    @property
    def due(self) -> Signal | None:
        """The signal of the next update; None: not enough groups wait for one."""
        after = _SIGNALS.index(self._last) + 1
        order = (*_SIGNALS[after:], *_SIGNALS[:after])
        return next((signal for signal in order if self._is_due(signal)), None)

    def _is_due(self, signal: Signal) -> bool:
        if signal is Signal.REWARDS:
            return self.enough
        return sum(len(group.scored) for group in self._ready(signal)) >= self.wanted(signal)

    def wanted(self, signal: Signal) -> int:
        """The trajectories that make a whole update."""
        if signal is Signal.REWARDS:
            return self._training.pace.trajectories
        return self._people.update_frequency * signal.answers

    def waiting(self) -> Mapping[str, int]:
        """The groups that people have made and that wait, by signal."""
        return {signal.value: len(self._ready(signal)) for signal in _SIGNALS[1:]}

    @property
    def explores(self) -> bool:
        """Whether the next update looks for a way out of a plateau. Then groups of equal rewards have a signal too."""
        return self._compares and self._training.plateau.explores

    # -- when groups become complete -------------------------------------------------------------

    def look(self) -> None:
        """Looks at groups that have become complete, and drops those without a signal."""
        if self._imitates:
            return
        for group in self._ready(Signal.REWARDS):
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

    def restart(self) -> None:
        """Call this when the policy was replaced. Groups that were dropped no longer count, and those that wait in the
        buffer count in the new reward trend."""
        self.forget()
        for group in self._ready(Signal.REWARDS):
            group.seen = group.observed = False

    def forget(self) -> None:
        """Groups that were dropped no longer count towards an update."""
        self._without_signal.clear()

    # -- taking them -----------------------------------------------------------------------------

    def take(self) -> Sequence[TrajectoryGroup]:
        """Takes the groups of one automatic update."""
        due = None if self._training.rewards_fell else self.due
        self._last = due or Signal.REWARDS
        return self._buffer.take(self._training.name, self.wanted(self._last), self._last)

    def take_all(self, signal: Signal | None, chosen: Chosen) -> Sequence[TrajectoryGroup]:
        """Takes all groups with this signal that are `chosen`; None: those with rewards or, if none are complete, the
        first others."""
        name = self._training.name
        found = (each for each in _SIGNALS if self._ready(each))
        ready = self._buffer.take(name, signal=signal or next(found, Signal.REWARDS))
        for group in ready:
            if not chosen(group.group_id):
                self._buffer.give_back(group)
        return tuple(group for group in ready if group.taken)

    def scored(
        self, groups: Sequence[TrajectoryGroup], chosen: Chosen
    ) -> tuple[Sequence[ScoredGroup], Sequence[ScoredGroup]]:
        """What an update of these groups learns from. If the loss imitates, trajectories with a low reward are dropped.

        `chosen`: which groups without a signal count for this update. The others count for a later one.

        Returns:
            Groups that were dropped without a signal since the last update, whose rewards count in its metrics; and
            `groups`, in order.
        """
        if groups and groups[0].signal is not Signal.REWARDS:
            return (), [_of_people(group) for group in groups]
        if self._imitates:
            for group in groups:
                self._drop_low(group)
        scored = [self._scored(group, group.in_state(TrajectoryState.TRAINING)) for group in groups]
        for group, each in zip(groups, scored, strict=True):
            if not group.observed:
                self._observe(each)
                if not group.seen:
                    self._observe_plateau(each)
            group.observed = False
        counted = [key for key in self._without_signal if chosen(key[1])]
        return [self._without_signal.pop(key) for key in counted], scored

    def _ready(self, signal: Signal) -> Sequence[TrajectoryGroup]:
        return self._buffer.ready(self._training.name, signal)

    def _staleness(self, group: TrajectoryGroup) -> int | None:
        """How many versions were published since the oldest of those that sampled the group; None: training does not
        continue from one of them. A group that a client sent counts as new."""
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
            tuple(members),
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


def _of_people(group: TrajectoryGroup) -> ScoredGroup:
    """Corrections have no reward: they are imitated whatever the threshold is."""
    members = group.in_state(TrajectoryState.TRAINING)
    rewards = tuple(member.reward for member in members if member.reward is not None)
    return ScoredGroup(
        tuple(members),
        rewards if group.signal.has_rewards else (),
        group.source,
        signal=group.signal,
    )
