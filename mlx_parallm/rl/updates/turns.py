"""UpdateTurns: which signal the next update learns from. Signals of which enough wait take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from mlx_parallm.config import ResolvedTraining
from mlx_parallm.core import Signal
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.objectives.batches import ScoredGroup
from mlx_parallm.rl.objectives.episodes import Episode
from mlx_parallm.rl.sources import source_of
from mlx_parallm.rl.trajectories import TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.selection import GroupSelection

Chosen = Callable[[str], bool]
"""Whether an update takes the group of this id."""

_SIGNALS = tuple(Signal)


class UpdateTurns:
    """Takes groups of one adapter for its updates. All groups of one update teach the same, because each signal has a
    loss of its own. Event loop's thread only."""

    def __init__(
        self, training: AdapterTraining, buffer: TrajectoryBuffer, config: ResolvedTraining, selection: GroupSelection
    ) -> None:
        self._training = training
        self._buffer = buffer
        self._config = config
        self._selection = selection
        self._last = _SIGNALS[-1]
        self._chosen: Chosen = _any

    @property
    def due(self) -> Signal | None:
        """The signal of the next update; None: not enough groups wait for one."""
        after = _SIGNALS.index(self._last) + 1
        order = (*_SIGNALS[after:], *_SIGNALS[:after])
        return next((signal for signal in order if self._enough(signal)), None)

    def wanted(self, signal: Signal) -> int:
        """The trajectories that make a whole update."""
        if signal is Signal.REWARDS:
            return self._training.pace.trajectories
        edits = self._config.people.update_frequency
        return 2 * edits if signal is Signal.PREFERENCES else edits

    def waiting(self) -> Mapping[str, int]:
        """The groups that people have made and that wait, by signal."""
        return {signal.value: len(self._buffer.ready(self._training.name, signal)) for signal in _SIGNALS[1:]}

    def take(self) -> Sequence[TrajectoryGroup]:
        """Takes the groups of one automatic update."""
        due = None if self._training.rewards_fell else self.due
        self._last, self._chosen = due or Signal.REWARDS, _any
        return self._buffer.take(self._training.name, self.wanted(self._last), self._last)

    def take_all(self, signal: Signal | None, chosen: Chosen | None = None) -> Sequence[TrajectoryGroup]:
        """Takes all groups with this signal; None: those with rewards or, if none are complete, the first others.

        `chosen`: which of them; None: all.
        """
        name, self._chosen = self._training.name, chosen or _any
        found = (each for each in _SIGNALS if self._buffer.ready(name, each))
        ready = self._buffer.take(name, signal=signal or next(found, Signal.REWARDS))
        for group in ready:
            if not self._chosen(group.group_id):
                self._buffer.give_back(group)
        return tuple(group for group in ready if group.taken)

    def scored(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """The groups of an update with their rewards; see `GroupSelection.take`."""
        if not groups or groups[0].signal is Signal.REWARDS:
            return self._selection.take(groups, self._chosen)
        return [], list(map(_scored, groups))

    @property
    def explores(self) -> bool:
        """See `GroupSelection.explores`."""
        return self._selection.explores

    def _enough(self, signal: Signal) -> bool:
        if signal is Signal.REWARDS:
            return self._selection.enough
        waiting = self._buffer.ready(self._training.name, signal)
        return sum(len(group.scored) for group in waiting) >= self.wanted(signal)


def sources(groups: Sequence[TrajectoryGroup]) -> Counter[str]:
    """The members that an update has taken, by where their signal came from."""
    return Counter(source_of(group, member) for group in groups for member in group.in_state(TrajectoryState.TRAINING))


def _any(_: str) -> bool:
    return True


def _scored(group: TrajectoryGroup) -> ScoredGroup:
    """Corrections have no reward: they are imitated whatever the threshold is."""
    members = group.in_state(TrajectoryState.TRAINING)
    rewards = tuple(member.reward for member in members if member.reward is not None)
    return ScoredGroup(
        tuple(Episode(tuple(member.turns)) for member in members),
        () if group.signal is Signal.CORRECTIONS else rewards,
        group.source,
        signal=group.signal,
    )
