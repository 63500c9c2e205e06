"""Trajectories between their last token and their fate: each has one fate, and each drop one reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rl.fakes import groups_of, set_scores, trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup

NAME = "math"


def ref(version: int) -> AdapterRef:
    return AdapterRef(NAME, version)


def added(
    buffer: TrajectoryBuffer,
    name: str,
    n: int = 2,
    version: int = 1,
    adapter: str = NAME,
    scorer: str | None = "exact",
) -> TrajectoryGroup:
    group = TrajectoryGroup(adapter, trajectories(name, ref(version), n, scorer))
    buffer.add(group)
    return group


def scored(buffer: TrajectoryBuffer, name: str, *rewards: float, version: int = 1) -> TrajectoryGroup:
    group = added(buffer, name, len(rewards), version)
    set_scores(group, rewards)
    return group


def states(group: TrajectoryGroup) -> list[str]:
    return [member.reason or member.state for member in group.members]


def test_a_group_is_complete_when_all_are_scored() -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g")
    groups_of(buffer).apply(Feedback("g-0", 1.0))
    assert buffer.ready(NAME) == ()
    groups_of(buffer).apply(Feedback("g-1", 0.0))
    assert buffer.ready(NAME) == (group,)
    assert buffer.ready("other") == ()
    assert buffer.take(NAME) == (group,)
    assert buffer.take(NAME) == ()
    buffer.finish(group)
    assert states(group) == ["trained", "trained"]
    buffer.check_integrity()


def test_the_last_feedback_before_training_counts_and_outweighs_a_scorer() -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g")
    groups_of(buffer).apply(Feedback("g-0", 1.0))
    set_scores(group, (0.25, 0.5))
    groups_of(buffer).apply(Feedback("g-0", 0.75))
    assert [member.reward for member in group.members] == [0.75, 0.5]
    buffer.take(NAME)
    with pytest.raises(ConflictError, match="taken"):
        groups_of(buffer).apply(Feedback("g-0", 0.0))
    buffer.finish(group)
    with pytest.raises(ConflictError):
        groups_of(buffer).apply(Feedback("g-1", 0.0))
    with pytest.raises(UnknownTrajectoryError):
        groups_of(buffer).apply(Feedback("h-0", 0.0))
    assert [member.reward for member in group.members] == [0.75, 0.5]


def test_the_oldest_groups_that_no_update_has_make_room() -> None:
    buffer = TrajectoryBuffer(6)
    first = scored(buffer, "a", 1.0, 0.0)
    buffer.take(NAME)
    second, third = added(buffer, "b"), scored(buffer, "c", 1.0, 0.0)
    fourth = added(buffer, "d", 3)
    assert [states(group) for group in (first, second, third)] == [
        ["training"] * 2,
        ["buffer_full"] * 2,
        ["buffer_full"] * 2,
    ]
    assert states(fourth) == ["waiting"] * 3
    assert buffer.drops[NAME] == {DropReason.BUFFER_FULL: 4}
    with pytest.raises(ConflictError, match="buffer_full"):
        groups_of(buffer).apply(Feedback("b-0", 1.0))
    buffer.check_integrity()


def test_the_groups_of_one_key_do_not_push_out_those_of_a_key_with_fewer() -> None:
    buffer = TrajectoryBuffer(8)

    def of(owner: str, name: str) -> TrajectoryGroup:
        made = [replace(each, owner=owner) for each in trajectories(name, ref(1), 2, "exact")]
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


@pytest.mark.parametrize(
    ("n", "from_feedback", "left", "complete"),
    [
        (3, (0, 2), ["scored", "timeout", "scored"], True),
        (3, (1,), ["timeout", "scored", "timeout"], True),
        (2, (), ["timeout", "timeout"], False),
        (1, (), ["timeout"], False),
        (2, (0, 1), ["scored", "scored"], True),
        (1, (0,), ["scored"], True),
    ],
)
def test_at_its_time_limit_a_group_makes_do_with_the_rewards_it_has(
    n: int, from_feedback: tuple[int, ...], left: list[str], complete: bool
) -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g", n)
    for index in from_feedback:
        groups_of(buffer).apply(Feedback(f"g-{index}", float(index)))
    groups_of(buffer).expire("g")
    assert states(group) == left
    assert group.complete is complete
    assert buffer.ready(NAME) == ((group,) if complete else ())
    groups_of(buffer).expire("g")
    groups_of(buffer).expire("never was")
    assert states(group) == left
    buffer.check_integrity()


def test_a_failed_scorer_costs_its_group_only_and_not_one_that_feedback_completed() -> None:
    buffer = TrajectoryBuffer(10)
    failed, kept, other = added(buffer, "a"), added(buffer, "b"), added(buffer, "c")
    for index in range(2):
        groups_of(buffer).apply(Feedback(f"b-{index}", 1.0))
    groups_of(buffer).apply(Feedback("a-0", 1.0))
    buffer.drop(failed, DropReason.SCORING_FAILED, failed.waiting)
    buffer.drop(kept, DropReason.SCORING_FAILED, kept.waiting)
    assert [states(group) for group in (failed, kept, other)] == [
        ["scored", "scoring_failed"],
        ["scored"] * 2,
        ["waiting"] * 2,
    ]
    assert buffer.ready(NAME) == (failed, kept)


def test_one_judged_sample_is_taken_and_the_others_still_wait() -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g", 4, scorer=None)
    groups_of(buffer).apply(Feedback("g-2", 1.0))
    assert buffer.take(NAME) == (group,)
    groups_of(buffer).apply(Feedback("g-0", 1.0))
    assert buffer.ready(NAME) == ()  # until the update that has the other one has ended
    buffer.finish(group)
    assert states(group) == ["scored", "waiting", "trained", "waiting"]
    assert buffer.take(NAME) == (group,)
    buffer.finish(group, DropReason.HELD)
    assert states(group) == ["held", "waiting", "trained", "waiting"]
    with pytest.raises(ConflictError, match="taken for training"):
        groups_of(buffer).apply(Feedback("g-2", 0.0))
    buffer.check_integrity()
    groups_of(buffer).expire("g")
    assert states(group) == ["held", "timeout", "trained", "timeout"]
    assert not buffer.holds(group)
    assert buffer.trained[NAME] == 1
    buffer.check_integrity()


def test_siblings_of_what_an_update_has_may_become_stale_meanwhile() -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g", 3, scorer=None)
    groups_of(buffer).apply(Feedback("g-0", 1.0))
    buffer.take(NAME)
    groups_of(buffer).apply(Feedback("g-1", 1.0))
    buffer.sweep(NAME, lambda drawn_by: DropReason.STALE)
    assert states(group) == ["training", "stale", "stale"]
    assert buffer.holds(group)
    buffer.finish(group)
    assert states(group) == ["trained", "stale", "stale"]
    assert not buffer.holds(group)


def test_what_nobody_judged_makes_room_before_what_has_a_reward() -> None:
    buffer = TrajectoryBuffer(6)
    from_feedback, silent, newer = (added(buffer, name, scorer=None) for name in "abc")
    groups_of(buffer).apply(Feedback("a-0", 1.0))
    added(buffer, "d")
    added(buffer, "e")
    assert [buffer.holds(group) for group in (from_feedback, silent, newer)] == [True, False, False]
    added(buffer, "f", 6)
    assert not buffer.holds(from_feedback)


def test_updates_take_the_oldest_complete_groups_until_they_have_enough() -> None:
    buffer = TrajectoryBuffer(20)
    groups = [scored(buffer, name, 1.0, 0.0) for name in "abc"]
    added(buffer, "d")
    assert buffer.take(NAME, least=3) == tuple(groups[:2])
    assert buffer.take(NAME, least=3) == (groups[2],)
    assert buffer.waiting(NAME) == 2


def test_a_sweep_spares_what_an_update_has_and_other_adapters() -> None:
    buffer = TrajectoryBuffer(20)
    taken = scored(buffer, "a", 1.0, 0.0, version=1)
    buffer.take(NAME)
    old, new = scored(buffer, "b", 1.0, 0.0, version=1), added(buffer, "c", version=2)
    waiting, other = added(buffer, "d", version=1), added(buffer, "e", version=1, adapter="tone")
    buffer.sweep(NAME, lambda drawn_by: DropReason.STALE if drawn_by == ref(1) else None)
    assert [states(group)[0] for group in (taken, old, new, waiting, other)] == [
        "training", "stale", "waiting", "stale", "waiting"]  # fmt: skip
    assert buffer.drops == {NAME: {DropReason.STALE: 4}}


def test_what_is_past_is_remembered_for_as_many_trajectories_as_are_kept() -> None:
    buffer = TrajectoryBuffer(4)
    for name in "abc":
        buffer.drop(added(buffer, name), DropReason.STALE)
    with pytest.raises(UnknownTrajectoryError):
        groups_of(buffer).apply(Feedback("a-0", 1.0))
    with pytest.raises(ConflictError, match="stale"):
        groups_of(buffer).apply(Feedback("b-0", 1.0))
    buffer.check_integrity()


def test_the_newest_trajectories_come_first() -> None:
    buffer = TrajectoryBuffer(10)
    buffer.drop(added(buffer, "a"), DropReason.STALE)
    scored(buffer, "b", 1.0, 0.5)
    newest = [(one.trajectory_id, each.reward, each.state, each.reason) for one, each in buffer.newest(3)]
    assert newest == [("b-1", 0.5, "scored", None), ("b-0", 1.0, "scored", None), ("a-1", None, "dropped", "stale")]
    assert len(buffer.newest(100)) == 4
    assert buffer.newest(0) == []
