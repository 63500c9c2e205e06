"""Late feedback: opinions of an answer that no update with rewards will take. A copy of the answer has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlx_parallm.core import CollectionSpec, Signal, Trajectory
from mlx_parallm.rl.collect.groups import DropReason, TrajectoryGroup
from mlx_parallm.rl.runs.records import Feedback

LATE = "late-"
"""The ids of the copies begin with it."""

NOT_COUNTED = frozenset({DropReason.HELD, DropReason.SKIPPED, DropReason.REPLACED})
"""Reasons of drops after which no opinion counts: an update on the answer was refused, or the answer was sent again."""

_TOO_OLD = (DropReason.STALE, DropReason.UNKNOWN_VERSION)


def late_copy(trajectory: Trajectory) -> Trajectory:
    """The answer by itself, and of no version, since that does not matter to its loss."""
    copy_id = LATE + trajectory.trajectory_id
    return replace(
        trajectory,
        trajectory_id=copy_id,
        group_id=copy_id,
        group_size=1,
        adapter=None,
        sampling_logprobs=(),
        collection=CollectionSpec(metadata=trajectory.collection.metadata, signal=Signal.LATE_FEEDBACK),
    )


def late_opinion(copy: Trajectory, score: float, user: str) -> Feedback:
    """An opinion of a copy: 1 is for the answer, -1 against it."""
    return Feedback(copy.trajectory_id, 1.0 if score > 0 else -1.0, user)


def outlived(group: TrajectoryGroup) -> Iterator[tuple[Trajectory, list[Feedback]]]:
    """The opinions of people that were taken in time, of answers that became too old before an update took them, as
    late feedback: copies of the answers, each with its opinions."""
    for member in group.members if group.signal is Signal.REWARDS else ():
        for turn in member.turns if member.reason in _TOO_OLD else ():
            if opinions := member.opinions.get(turn.trajectory_id):
                copy = late_copy(turn)
                yield copy, [late_opinion(copy, score, user) for user, score in opinions.items()]
