"""A group: the trajectories of one prompt, and how each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_parallm.core import AdapterRef, Trajectory, TrajectoryCard

FEEDBACK = "feedback"
"""Stands for people where rewards are told apart by scorer."""


class State(StrEnum):
    """Of one trajectory; `core.TrajectoryCard.state`."""

    WAITING = "waiting"
    SCORED = "scored"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class Drop(StrEnum):
    """Why a trajectory was not learnt from.

    ABORTED: its request did not finish. FOREIGN: a version outside the trained lineage drew it. SINGLE: it has
    nothing to be compared with. LOW_REWARD: the loss imitates, and its reward is not above the threshold.
    SKIPPED, HELD: its update was.
    """

    BUFFER_FULL = "buffer_full"
    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    SINGLE = "single"
    LOW_REWARD = "low_reward"
    NOT_FINITE = "not_finite"
    SCORING_FAILED = "scoring_failed"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    FOREIGN = "foreign"
    SKIPPED = "skipped"
    HELD = "held"


@dataclass(eq=False, slots=True)
class Member:
    """One trajectory of a group. `judged`: the reward came as feedback. `reason` is set where it was dropped."""

    trajectory: Trajectory
    reward: float | None = None
    state: State = State.WAITING
    reason: Drop | None = None
    judged: bool = False

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
    def scorer(self) -> str | None:
        """The scoring function that its request named; None: its rewards come as feedback alone."""
        return self.members[0].trajectory.collection.scorer

    @property
    def complete(self) -> bool:
        """Whether an update can take it. A scorer rewards the whole group; a person may judge one sample of it."""
        return bool(self.scored) and not self.taken and (self.scorer is None or not self.waiting)

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
