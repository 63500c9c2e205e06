"""TrajectoryGroup: trajectories whose rewards are compared with each other, and their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.core import Trajectory, TrajectoryCard

FEEDBACK = "feedback"
"""Used in place of a scorer's name for groups whose rewards came from people."""


class TrajectoryState(StrEnum):
    """State of one trajectory; the values are those of `core.TrajectoryCard.state`."""

    WAITING = "waiting"
    SCORED = "scored"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a trajectory was not trained on.

    STALE: its version is more than `max_staleness` versions old. ZERO_VARIANCE: all rewards of its group are equal.
    SINGLE: there is no other reward to compare its reward with. LOW_REWARD: the loss is cross_entropy, and the reward
    does not exceed the threshold. ABORTED: its request did not finish. UNKNOWN_VERSION: the version that drew it is not
    in the version history of its adapter. SKIPPED: its update was skipped. HELD: the gate refused its update.
    """

    BUFFER_FULL = "buffer_full"
    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    SINGLE = "single"
    LOW_REWARD = "low_reward"
    SCORING_FAILED = "scoring_failed"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    UNKNOWN_VERSION = "unknown_version"
    SKIPPED = "skipped"
    HELD = "held"


@dataclass(eq=False, slots=True)
class GroupMember:
    """One trajectory of a group. `from_feedback`: its reward came from a person. `reason`: set when it is dropped."""

    trajectory: Trajectory
    reward: float | None = None
    state: TrajectoryState = TrajectoryState.WAITING
    reason: DropReason | None = None
    from_feedback: bool = False

    def card(self) -> TrajectoryCard:
        return TrajectoryCard(self.trajectory, self.reward, self.state.value, self.reason or "")


class TrajectoryGroup:
    """The trajectories of one prompt, all drawn by the same adapter version.

    Attributes:
        adapter: name of the adapter that the group trains.
        version: the adapter version that drew the trajectories.
        scorer: the scoring function that the request named; None: rewards come only from feedback.
        number: order of arrival, assigned by the buffer.
        observed: whether its rewards are in the adapter's reward trend already, before an update takes it.
    """

    def __init__(self, adapter: str, trajectories: Sequence[Trajectory]) -> None:
        first = trajectories[0]
        self.adapter, self.version = adapter, first.adapter
        self.group_id, self.scorer = first.group_id, first.collection.scorer
        self.members = tuple(map(GroupMember, trajectories))
        self.number = 0
        self.observed = False

    @property
    def complete(self) -> bool:
        """Whether an update can take the group. If it has a scorer, every member needs a reward; without a scorer,
        feedback on one member is enough."""
        states = {member.state for member in self.members}
        if TrajectoryState.SCORED not in states or TrajectoryState.TRAINING in states:
            return False
        return self.scorer is None or TrajectoryState.WAITING not in states

    @property
    def taken(self) -> bool:
        """Whether an update is using the group now."""
        return bool(self.in_state(TrajectoryState.TRAINING))

    @property
    def waiting(self) -> tuple[GroupMember, ...]:
        return self.in_state(TrajectoryState.WAITING)

    @property
    def scored(self) -> tuple[GroupMember, ...]:
        return self.in_state(TrajectoryState.SCORED)

    def in_state(self, state: TrajectoryState) -> tuple[GroupMember, ...]:
        return tuple(member for member in self.members if member.state is state)
