"""What makes room in the trajectory buffer, and what becomes of feedback on a trajectory that was taken or dropped."""

from __future__ import annotations

from dataclasses import replace

from rl.fakes import groups_of, set_scores, trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.trajectories import TrajectoryGroup

NAME = "math"
REF = AdapterRef(NAME, 1)


def added(buffer: TrajectoryBuffer, name: str, n: int = 2, scorer: str | None = "exact") -> TrajectoryGroup:
    group = TrajectoryGroup(NAME, trajectories(name, REF, n, scorer))
    buffer.add(group)
    return group


def scored(buffer: TrajectoryBuffer, name: str, *rewards: float) -> TrajectoryGroup:
    group = added(buffer, name, len(rewards))
    set_scores(group, rewards)
    return group


def states(group: TrajectoryGroup) -> list[str]:
    return [member.reason or member.state for member in group.members]


def test_the_groups_of_one_key_do_not_push_out_those_of_a_key_with_fewer() -> None:
    buffer = TrajectoryBuffer(8)

    def of(owner: str, name: str) -> TrajectoryGroup:
        made = [replace(each, owner=owner) for each in trajectories(name, REF, 2, "exact")]
        group = TrajectoryGroup(NAME, made)
        buffer.add(group)
        return group

    few = of("few", "a")
    many = [of("many", str(number)) for number in range(9)]
    assert states(few) == ["waiting"] * 2
    assert [states(group)[0] for group in many] == ["buffer_full"] * 6 + ["waiting"] * 3
    more = of("few", "b")
    assert states(more) == ["waiting"] * 2
    assert states(many[6]) == ["buffer_full"] * 2
    buffer.check_integrity()


def test_a_group_that_cannot_fit_goes_itself_and_drives_out_nothing() -> None:
    buffer = TrajectoryBuffer(4)
    taken = scored(buffer, "a", 1.0, 0.0)
    buffer.take(NAME)
    waiting = added(buffer, "b", 1)
    too_large = added(buffer, "c", 3)
    assert [states(group) for group in (taken, waiting, too_large)] == [
        ["training"] * 2,
        ["waiting"],
        ["buffer_full"] * 3,
    ]
    buffer.check_integrity()


def test_what_nobody_judged_makes_room_before_what_has_a_reward() -> None:
    buffer = TrajectoryBuffer(6)
    from_feedback, silent, newer = (added(buffer, name, scorer=None) for name in "abc")
    groups_of(buffer).apply(Feedback("a-0", 1.0))
    added(buffer, "d")
    added(buffer, "e")
    assert [buffer.holds(group) for group in (from_feedback, silent, newer)] == [True, False, False]
    added(buffer, "f", 6)
    assert not buffer.holds(from_feedback)
