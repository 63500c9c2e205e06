"""Trajectories between their last token and their fate: each has one fate, and each drop one reason."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rl.fakes import trajectories

from mlx_parallm.core import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.groups import Drop, Group, State
from mlx_parallm.rl.lineage import Lineage
from mlx_parallm.rl.spill import SpillFile

NAME = "math"


def ref(version: int) -> AdapterRef:
    return AdapterRef(NAME, version)


def added(
    buffer: TrajectoryBuffer,
    name: str,
    n: int = 2,
    version: int = 1,
    trainee: str = NAME,
    scorer: str | None = "exact",
) -> Group:
    group = Group.of(trainee, trajectories(name, ref(version), n, scorer))
    buffer.add(group)
    return group


def scored(buffer: TrajectoryBuffer, name: str, *rewards: float, version: int = 1) -> Group:
    group = added(buffer, name, len(rewards), version)
    buffer.score(group, rewards)
    return group


def states(group: Group) -> list[str]:
    return [member.reason or member.state for member in group.members]


def test_a_group_is_complete_when_all_are_scored() -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g")
    buffer.feedback("g-0", 1.0)
    assert buffer.ready(NAME) == ()
    buffer.feedback("g-1", 0.0)
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
    buffer.feedback("g-0", 1.0)
    buffer.score(group, (0.25, 0.5))
    buffer.feedback("g-0", 0.75)
    assert [member.reward for member in group.members] == [0.75, 0.5]
    buffer.take(NAME)
    with pytest.raises(ConflictError, match="taken"):
        buffer.feedback("g-0", 0.0)
    buffer.finish(group)
    with pytest.raises(ConflictError):
        buffer.feedback("g-1", 0.0)
    with pytest.raises(UnknownTrajectoryError):
        buffer.feedback("h-0", 0.0)
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
    assert buffer.drops[NAME] == {Drop.BUFFER_FULL: 4}
    with pytest.raises(ConflictError, match="buffer_full"):
        buffer.feedback("b-0", 1.0)
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
    ("n", "judged", "left", "complete"),
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
    n: int, judged: tuple[int, ...], left: list[str], complete: bool
) -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g", n)
    for index in judged:
        buffer.feedback(f"g-{index}", float(index))
    buffer.expire("g")
    assert states(group) == left
    assert group.complete is complete
    assert buffer.ready(NAME) == ((group,) if complete else ())
    buffer.expire("g")
    buffer.expire("never was")
    assert states(group) == left
    buffer.check_integrity()


def test_a_failed_scorer_costs_its_group_only_and_not_one_that_feedback_completed() -> None:
    buffer = TrajectoryBuffer(10)
    failed, kept, other = added(buffer, "a"), added(buffer, "b"), added(buffer, "c")
    for index in range(2):
        buffer.feedback(f"b-{index}", 1.0)
    buffer.feedback("a-0", 1.0)
    buffer.fail(failed)
    buffer.fail(kept)
    assert [states(group) for group in (failed, kept, other)] == [
        ["scored", "scoring_failed"],
        ["scored"] * 2,
        ["waiting"] * 2,
    ]
    assert buffer.ready(NAME) == (failed, kept)


def test_one_judged_sample_is_taken_and_the_others_still_wait() -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g", 4, scorer=None)
    buffer.feedback("g-2", 1.0)
    assert buffer.take(NAME) == (group,)
    buffer.feedback("g-0", 1.0)
    assert buffer.ready(NAME) == ()  # until the update that has the other one has ended
    buffer.finish(group)
    assert states(group) == ["scored", "waiting", "trained", "waiting"]
    assert buffer.take(NAME) == (group,)
    buffer.finish(group, Drop.HELD)
    assert states(group) == ["held", "waiting", "trained", "waiting"]
    with pytest.raises(ConflictError, match="taken for training"):
        buffer.feedback("g-2", 0.0)
    buffer.check_integrity()
    buffer.expire("g")
    assert states(group) == ["held", "timeout", "trained", "timeout"]
    assert not buffer.holds(group)
    assert buffer.trained[NAME] == 1
    buffer.check_integrity()


def test_siblings_of_what_an_update_has_may_become_stale_meanwhile() -> None:
    buffer = TrajectoryBuffer(10)
    group = added(buffer, "g", 3, scorer=None)
    buffer.feedback("g-0", 1.0)
    buffer.take(NAME)
    buffer.feedback("g-1", 1.0)
    buffer.sweep(NAME, lambda drawn_by: Drop.STALE)
    assert states(group) == ["training", "stale", "stale"]
    assert buffer.holds(group)
    buffer.finish(group)
    assert states(group) == ["trained", "stale", "stale"]
    assert not buffer.holds(group)


def test_what_nobody_judged_makes_room_before_what_has_a_reward() -> None:
    buffer = TrajectoryBuffer(6)
    judged, silent, newer = (added(buffer, name, scorer=None) for name in "abc")
    buffer.feedback("a-0", 1.0)
    added(buffer, "d")
    added(buffer, "e")
    assert [buffer.holds(group) for group in (judged, silent, newer)] == [True, False, False]
    added(buffer, "f", 6)
    assert not buffer.holds(judged)


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
    waiting, other = added(buffer, "d", version=1), added(buffer, "e", version=1, trainee="tone")
    buffer.sweep(NAME, lambda drawn_by: Drop.STALE if drawn_by == ref(1) else None)
    assert [states(group)[0] for group in (taken, old, new, waiting, other)] == [
        "training", "stale", "waiting", "stale", "waiting"]  # fmt: skip
    assert buffer.drops == {NAME: {Drop.STALE: 4}}


def test_what_is_past_is_remembered_for_as_many_trajectories_as_are_kept() -> None:
    buffer = TrajectoryBuffer(4)
    for name in "abc":
        buffer.drop(added(buffer, name), Drop.STALE)
    with pytest.raises(UnknownTrajectoryError):
        buffer.feedback("a-0", 1.0)
    with pytest.raises(ConflictError, match="stale"):
        buffer.feedback("b-0", 1.0)
    buffer.check_integrity()


def test_cards_are_of_the_newest_first() -> None:
    buffer = TrajectoryBuffer(10)
    buffer.drop(added(buffer, "a"), Drop.STALE)
    scored(buffer, "b", 1.0, 0.5)
    cards = buffer.cards(3)
    assert [(card.trajectory.trajectory_id, card.reward, card.state, card.reason) for card in cards] == [
        ("b-1", 0.5, "scored", ""), ("b-0", 1.0, "scored", ""), ("a-1", None, "dropped", "stale")]  # fmt: skip
    assert len(buffer.cards(100)) == 4
    assert buffer.cards(0) == ()


# ---- any order of events ------------------------------------------------------------------------

SIZE = 9


class Life(RuleBasedStateMachine):
    """Groups of three versions of two adapters live and die in any order; each trajectory ends at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.fed: set[str] = set()
        self.buffer = TrajectoryBuffer(SIZE, self.ended)
        self.groups: list[Group] = []
        self.taken: list[Group] = []

    def ended(self, group: Group) -> None:
        self.ends.update(member.trajectory.trajectory_id for member in group.members)

    def some(self, data: st.DataObject, groups: list[Group]) -> Group:
        return data.draw(st.sampled_from(groups))

    @rule(
        n=st.integers(1, 4),
        version=st.integers(1, 3),
        trainee=st.sampled_from(["math", "tone"]),
        scorer=st.sampled_from([None, "exact"]),
    )
    def collect(self, n: int, version: int, trainee: str, scorer: str | None) -> None:
        group = Group.of(trainee, trajectories(f"g{len(self.groups)}", AdapterRef(trainee, version), n, scorer))
        self.groups.append(group)
        self.buffer.add(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        group = self.some(data, self.groups)
        before = [member.reward for member in group.members]
        self.buffer.score(group, [float(index) for index in range(len(group.members))])
        assert all(now.reward == old for now, old in zip(group.members, before, strict=True) if old is not None)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.buffer.fail(self.some(data, self.groups))

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), index=st.integers(0, 3), score=st.floats(-1, 1))
    def feedback(self, data: st.DataObject, index: int, score: float) -> None:
        group = self.some(data, self.groups)
        member = group.members[index % len(group.members)]
        open_fate = member.state in (State.WAITING, State.SCORED)
        try:
            self.buffer.feedback(member.trajectory.trajectory_id, score)
        except (ConflictError, UnknownTrajectoryError):
            assert not open_fate
        else:
            assert open_fate
            assert member.reward == score

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        group = self.some(data, self.groups)
        self.buffer.expire(group.group_id)
        assert not group.waiting

    @rule(trainee=st.sampled_from(["math", "tone"]), least=st.none() | st.integers(1, 6))
    def take(self, trainee: str, least: int | None) -> None:
        ready = self.buffer.ready(trainee)
        taken = self.buffer.take(trainee, least)
        assert taken == ready[: len(taken)]
        counts = [len(group.in_state(State.TRAINING)) for group in taken]
        assert least is not None or len(taken) == len(ready)
        assert least is None or sum(counts[:-1]) < least
        assert least is None or sum(counts) >= least or len(taken) == len(ready)
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), reason=st.none() | st.sampled_from([Drop.HELD, Drop.SKIPPED, Drop.ZERO_VARIANCE]))
    def end(self, data: st.DataObject, reason: Drop | None) -> None:
        group = self.some(data, self.taken)
        self.taken.remove(group)
        if reason is None:
            self.trained.update(m.trajectory.trajectory_id for m in group.in_state(State.TRAINING))
        self.buffer.finish(group, reason)
        assert not group.taken

    @rule(trainee=st.sampled_from(["math", "tone"]), oldest=st.integers(1, 3))
    def sweep(self, trainee: str, oldest: int) -> None:
        self.buffer.sweep(trainee, lambda drawn_by: Drop.STALE if drawn_by.version < oldest else None)
        left = [group for group in self.groups if group.trainee == trainee and (group.waiting or group.scored)]
        assert all(group.adapter.version >= oldest for group in left)

    @rule(n=st.integers(1, 4))
    def lose(self, n: int) -> None:
        before = self.buffer.drops["math"][Drop.ABORTED]
        self.buffer.lost("math", n)
        assert self.buffer.drops["math"][Drop.ABORTED] == before + n

    @invariant()
    def books_agree(self) -> None:
        self.buffer.check_integrity()
        assert all(count == 1 for count in self.ends.values())
        assert all(count == 1 for count in self.trained.values())
        assert all(self.buffer.holds(group) for group in self.taken)
        held = {m.trajectory.trajectory_id for g in self.groups if self.buffer.holds(g) for m in g.members}
        everything = {m.trajectory.trajectory_id for g in self.groups for m in g.members}
        assert held | self.ends.keys() == everything
        assert not held & self.ends.keys()
        assert sum(self.buffer.trained.values()) == len(self.trained)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_life = Life.TestCase


# ---- the lineage --------------------------------------------------------------------------------


def test_lag_counts_publications_not_version_numbers() -> None:
    lineage = Lineage(BASE_ADAPTER)
    for version in (2, 5):
        lineage.append(ref(version))
    assert [lineage.lag(r) for r in (BASE_ADAPTER, ref(2), ref(5), ref(3))] == [2, 1, 0, None]
    lineage.back_to(ref(2))
    lineage.append(ref(6))
    assert [lineage.lag(r) for r in (BASE_ADAPTER, ref(2), ref(5), ref(6))] == [2, 1, None, 0]
    assert lineage.knew(ref(5))
    assert not lineage.knew(ref(3))
    lineage.back_to(ref(1))
    assert [lineage.lag(r) for r in (BASE_ADAPTER, ref(6), ref(1))] == [None, None, 0]
    assert lineage.tip == ref(1)


# ---- the file -----------------------------------------------------------------------------------


def spilled(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_trajectory_is_one_line_once_its_fate_is_known(tmp_path: Path) -> None:
    file = SpillFile(tmp_path / "log" / "t.jsonl")
    buffer = TrajectoryBuffer(10, file.append)
    group = Group.of(NAME, trajectories("g", ref(4), 3, metadata={"answer": "4\n", "tag": "é"}))
    buffer.add(group)
    for index in (0, 2):
        buffer.feedback(f"g-{index}", index / 2)
    buffer.expire("g")
    buffer.take(NAME)
    buffer.finish(group)
    added(buffer, "open")
    buffer.drop(added(buffer, "h", 1), Drop.STALE)
    await file.close()
    lines = spilled(tmp_path / "log" / "t.jsonl")
    assert [(line["trajectory_id"], line["fate"], line["reason"], line["reward"]) for line in lines] == [
        ("g-0", "trained", "", 0.0), ("g-1", "dropped", "timeout", None), ("g-2", "trained", "", 1.0),
        ("h-0", "dropped", "stale", None)]  # fmt: skip
    assert lines[0]["metadata"] == {"answer": "4\n", "tag": "é"}
    assert lines[0]["sampling_logprobs"] == [-0.5, -1.0]
    assert lines[0]["completion_token_ids"] == [3, 4]
    assert (lines[0]["adapter"], lines[0]["scoring_function"]) == ("math@4", "exact")
    assert file.failures == 0


async def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"trajectory_id": "whole"}\n{"trajec')
    file = SpillFile(path)
    TrajectoryBuffer(1, file.append).add(Group.of(NAME, trajectories("g", ref(1), 2)))
    await file.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"trajectory_id": "whole"}', '{"trajec']
    assert [json.loads(line)["trajectory_id"] for line in lines[2:]] == ["g-0", "g-1"]


def fails(*_: object) -> int:
    raise OSError(28, "No space left on device")


def half(real: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    return lambda descriptor, data: real(descriptor, data[: len(data) // 2])


@pytest.mark.parametrize("broken", [fails, half(os.write)])
async def test_a_failing_disk_costs_whole_groups_and_nothing_else(
    tmp_path: Path, broken: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    file = SpillFile(path)
    buffer = TrajectoryBuffer(4, file.append)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", broken)
        buffer.drop(added(buffer, "a"), Drop.STALE)
        await _failed(file)
    buffer.drop(added(buffer, "c"), Drop.STALE)
    await file.close()
    assert [line["trajectory_id"] for line in spilled(path)] == ["c-0", "c-1"]
    assert file.failures == 1
    buffer.check_integrity()


async def _failed(file: SpillFile) -> None:
    """Returns once the worker has tried."""
    while not file.failures:
        await asyncio.sleep(0.001)
