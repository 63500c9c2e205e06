"""Gathering: which trajectories the next update learns from, and when they are enough."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from mlx_parallm.rl import candidates
from mlx_parallm.rl.batches import no_signal
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.candidates import Candidate
from mlx_parallm.rl.groups import Group, Member, State
from mlx_parallm.rl.trainee import Trainee

REFILLS = 3
"""An update waits for at most so many times the trajectories that it wants, beyond those that it wants."""


class Gathering:
    """Complete groups of one adapter, sorted as they come. Event loop's thread only.

    A group without a signal teaches nothing: it is dropped at once and does not count towards an update, but its
    rewards do count in how well the policy does.

    Args:
        wanted: trajectories with a signal that make an update.
        imitation: the loss is cross_entropy: every group has a signal.
    """

    def __init__(self, trainee: Trainee, buffer: TrajectoryBuffer, wanted: int, imitation: bool) -> None:
        self._trainee = trainee
        self._buffer = buffer
        self._wanted = wanted
        self._imitation = imitation
        self._flat: deque[Candidate] = deque()
        self._observed: set[str] = set()  # ids of ready groups

    @property
    def with_signal(self) -> int:
        """Trajectories that an update can take."""
        return sum(len(group.scored) for group in self._buffer.ready(self._trainee.name))

    @property
    def without_signal(self) -> int:
        """Trajectories dropped since the last update because their groups teach nothing."""
        return sum(len(candidate.rewards) for candidate in self._flat)

    @property
    def enough(self) -> bool:
        """Whether an update is due: there is a whole batch, or it has waited long enough for one."""
        with_signal = self.with_signal
        return with_signal >= self._wanted or with_signal + self.without_signal >= (1 + REFILLS) * self._wanted

    def sort(self) -> None:
        """Looks at the groups that have become complete."""
        if self._imitation:
            return
        for group in self._buffer.ready(self._trainee.name):
            if group.scorer is not None and group.group_id not in self._observed and self._lag(group) is not None:
                self._sort(group)
        self._observed &= {group.group_id for group in self._buffer.ready(self._trainee.name)}
        while self.without_signal > (1 + REFILLS) * self._wanted:  # training is paused
            self._flat.popleft()

    def _sort(self, group: Group) -> None:
        candidate = self._candidate(group, group.scored)
        self._observe(group, candidate)
        if (reason := no_signal(group)) is not None:
            self._flat.append(candidate)
            self._buffer.drop(group, reason)

    def take(self, groups: Sequence[Group]) -> tuple[list[Candidate], list[Candidate]]:
        """Those without a signal since the last update, and these groups, which an update has taken. Begins anew."""
        taken = [self._candidate(group, group.in_state(State.TRAINING)) for group in groups]
        for group, candidate in zip(groups, taken, strict=True):
            if candidate.rewards and group.group_id not in self._observed and not self._imitation:
                self._observe(group, candidate)
        flat = [*self._flat]
        self.restart()
        return flat, taken

    def restart(self) -> None:
        """What was dropped so far belongs to a policy that is gone."""
        self._flat.clear()
        self._observed.clear()

    def _observe(self, group: Group, candidate: Candidate) -> None:
        self._observed.add(group.group_id)
        current = candidate.lag == 0 and not self._trainee.drifted
        self._trainee.memory.trend.observe(candidate.scorer, fmean(candidate.rewards), current)

    def _candidate(self, group: Group, members: Sequence[Member]) -> Candidate:
        lag = self._lag(group)
        assert lag is not None  # else it was swept
        return candidates.collected(group, members, lag, on_policy=lag == 0 and not self._trainee.drifted)

    def _lag(self, group: Group) -> int | None:
        return self._trainee.lineage.lag(group.adapter)
