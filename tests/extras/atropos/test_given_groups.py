"""Groups that were drawn elsewhere: kept before they are acknowledged, trained once, and each source has its part."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import changed
from rl.service_rig import SETTINGS, until, world
from rl.test_recovery import MANUAL, Run

from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import QueueFullError, StorageError
from mlx_parallm.extras.atropos.groups import AtroposGroups, GivenGroup
from mlx_parallm.rl.runs.journal import Journal


def group(name: str, source: str = "atropos:a", size: int = 2, **fields: object) -> GivenGroup:
    each = [GivenTrajectory((1, 2), (3, 4), float(number % 2), **fields) for number in range(size)]
    return GivenGroup(name, source, tuple(each))


async def test_given_groups_are_trained_when_there_are_enough() -> None:
    async with world() as one:
        await AtroposGroups(one.service).give(group("g0"))
        assert not one.service.loop().has_enough
        assert AtroposGroups(one.service).sizes() == {"atropos:a": [2]}
        await AtroposGroups(one.service).give(group("g1"))
        await until(lambda: one.service.status().updates_total == 1)
        assert set(one.states().values()) == {"trained"}
        assert AtroposGroups(one.service).sizes() == {}


async def test_they_are_trained_however_many_versions_were_published_since_they_came() -> None:
    async with world(changed(SETTINGS, update_frequency=100, max_staleness=0)) as one:
        await AtroposGroups(one.service).give(group("g0"))
        for number in range(3):
            await one.service.update(given=[GivenTrajectory((1,), (number,), 1.0), GivenTrajectory((1,), (9,), 0.0)])
        assert (await one.service.update()).metrics["trajectories"] == 2.0


async def test_what_waits_when_the_process_is_killed_is_trained_once_by_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await AtroposGroups(one.service).give(group("trained", advantages=(0.5, -0.5), mask=(True, True)))
        await one.service.update()
        await AtroposGroups(one.service).give(group("waiting", mask=(False, True)))
    async with run.process() as one:
        assert set(one.states().values()) == {"scored"}
        assert len(one.states()) == 2, "the trained group does not wait again"
        newest = one.service.trajectories.buffer.newest(9)
        assert {each.mask for each, _ in newest} == {(False, True)}
        assert {each.adapter for each, _ in newest} == {None}
        assert sorted(member.reward for _, member in newest) == [0.0, 1.0]
        assert await AtroposGroups(one.service).last(9) == ["waiting", "trained"]
        assert (await one.service.update()).metrics["trajectories"] == 2.0
    async with run.process() as one:
        assert one.states() == {}


async def test_a_group_that_the_disk_refuses_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise StorageError("the journal of the run cannot be written: disk full")

    async with world() as one:
        monkeypatch.setattr(Journal, "accept", full)
        with pytest.raises(StorageError):
            await AtroposGroups(one.service).give(group("g0"))
        assert one.states() == {}


async def test_no_group_is_pushed_out_by_another_and_each_source_has_its_part() -> None:
    settings = changed(MANUAL, trajectory_buffer_size=8)
    async with world(settings) as one:
        for number in range(3):
            await AtroposGroups(one.service).give(group(f"a{number}"))
        await AtroposGroups(one.service).give(group("b0", "atropos:b"))
        with pytest.raises(QueueFullError, match="8 of 8 trajectories wait"):
            await AtroposGroups(one.service).give(group("b1", "atropos:b"))
        await one.service.update()
        for number in range(2):
            await AtroposGroups(one.service).give(group(f"a{number + 3}"))
            await AtroposGroups(one.service).give(group(f"b{number + 2}", "atropos:b", size=1))
        with pytest.raises(QueueFullError, match="its part of the buffer is 4"):
            await AtroposGroups(one.service).give(group("a9"))
        await AtroposGroups(one.service).give(group("b9", "atropos:b"))
