"""A group: the trajectories of one prompt, and how each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_parallm.core import AdapterRef, Trajectory, TrajectoryCard


class State(StrEnum):
    """Of one trajectory; `core.TrajectoryCard.state`."""

    WAITING = "waiting"
    SCORED = "scored"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class Drop(StrEnum):
    """Why a trajectory was not learnt from.

    ABORTED: its request did not finish. FOREIGN: a version outside the trained lineage drew it. SINGLE: nothing is
    left to compare it with. SKIPPED, HELD: its update was.
    """

    BUFFER_FULL = "buffer_full"
    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    SINGLE = "single"
    NOT_FINITE = "not_finite"
    SCORING_FAILED = "scoring_failed"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    FOREIGN = "foreign"
    SKIPPED = "skipped"
    HELD = "held"


@dataclass(eq=False, slots=True)
class Member:
    """One trajectory of a group. `reason` is set where it was dropped."""

    trajectory: Trajectory
    reward: float | None = None
    state: State = State.WAITING
    reason: Drop | None = None

    def drop(self, reason: Drop) -> None:
        self.state, self.reason = State.DROPPED, reason

    def card(self) -> TrajectoryCard:
        return TrajectoryCard(self.trajectory, self.reward, self.state.value, self.reason or "")


@dataclass(eq=False, slots=True)
class Group:
    """`trainee`: name of the adapter it trains. `number`: order of arrival, given by the buffer."""

    trainee: str
    members: tuple[Member, ...]
    number: int = field(default=0)

    @classmethod
    def of(cls, trainee: str, trajectories: Sequence[Trajectory]) -> Group:
        return cls(trainee, tuple(map(Member, trajectories)))

    @property
    def group_id(self) -> str:
        return self.members[0].trajectory.group_id

    @property
    def adapter(self) -> AdapterRef:
        """The version that drew it."""
        return self.members[0].trajectory.adapter

    @property
    def scorer(self) -> str:
        """Whose rewards it has: they are compared with that scorer's only."""
        return self.members[0].trajectory.collection.scorer or "feedback"

    @property
    def complete(self) -> bool:
        """Whether an update can take it."""
        return bool(self.scored) and not self.waiting

    @property
    def taken(self) -> bool:
        """Whether an update has it now."""
        return bool(self.in_state(State.TRAINING))

    @property
    def waiting(self) -> tuple[Member, ...]:
        return self.in_state(State.WAITING)

    @property
    def scored(self) -> tuple[Member, ...]:
        return self.in_state(State.SCORED)

    def in_state(self, state: State) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.state is state)
