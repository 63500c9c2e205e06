"""What turns are to their episodes: whether each continues the tokens of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from mlx_parallm.core import Trajectory
from mlx_parallm.rl.collect.groups import GroupMember, TrajectoryGroup


class TurnKind(StrEnum):
    """What a turn is to its episode. CONTINUED: its prompt continues the tokens of an earlier turn. APART: it does not,
    so it becomes a sample of its own."""

    FIRST = "first"
    CONTINUED = "continued"
    APART = "apart"


def kinds_of_turns(group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> list[TurnKind]:
    """What trajectories that came together are to their episodes; nothing for those that belong to none."""
    return [
        _kind_of_turn(member, turn, len(trajectories) > 1)
        for turn in trajectories
        if (member := group.episode(turn.collection.episode_id)) is not None
    ]


def _kind_of_turn(member: GroupMember, turn: Trajectory, came_with_others: bool) -> TurnKind:
    if len(member.turns) == 1 or (came_with_others and turn is member.turns[0]):
        return TurnKind.FIRST
    return TurnKind.CONTINUED if member.continues(turn) else TurnKind.APART
