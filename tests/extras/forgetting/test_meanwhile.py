"""Forgetting while updates run, other programs read, and clients go on; and what fails of it."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from extras.forgetting.forgetting_rig import (
    KEYS,
    ended,
    equal,
    forgetting_of,
    give,
    policy,
    run,
    teach,
    training_of,
    trajectories,
)

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec, Forgotten, removal
from mlx_parallm.rl.runs.records import Closed, EpisodeReward
from mlx_parallm.rl.trajectory_log import TrajectoryLog

RARELY = {"checkpointing__interval": 4}


def of_bob(one: Trajectory) -> bool:
    return one.owner == "bob"


@pytest.mark.parametrize("earlier", [0, 2])
async def test_an_update_under_way_has_not_learnt_from_it_either(tmp_path: Path, earlier: int) -> None:
    async with run(tmp_path, "control", **RARELY) as served:
        await teach(served, range(earlier + 1), of_bob)
        control = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(earlier))
        for key in KEYS:
            await give(served, earlier, key)
        update = asyncio.create_task(training_of(served).update())
        await asyncio.sleep(0)
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        assert (await update).status == "published"
        assert (await ended(forgetting_of(served))).state == "done"
        assert equal(await policy(served), control)


async def test_one_thing_is_forgotten_at_a_time(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(2))
        forgetting = forgetting_of(served)
        both = (forgetting.begin(ForgetSpec(key=key)) for key in ("bob", "eve"))
        _, second = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(second, ConflictError)
        assert (await ended(forgetting)).state == "done"
        await forgetting.begin(ForgetSpec(key="eve"))
        assert (await ended(forgetting)).state == "done"


async def test_what_has_failed_is_tried_again_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"

    async def broken(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(log))

    async with run(tmp_path, **RARELY, rl_training__trajectory_log=log) as served:
        await teach(served, range(2))
        forgetting = forgetting_of(served)
        with monkeypatch.context() as patched:
            patched.setattr(TrajectoryLog, "forget", broken)
            await forgetting.begin(ForgetSpec(key="bob"))
            async with asyncio.timeout(60):
                card = await ended(forgetting)
        assert (card.state, card.reason) == ("failed", "default: Permission denied; let this user write there")
        assert b"bob" in log.read_bytes()
        await forgetting.begin(ForgetSpec(key="bob"))
        assert (await ended(forgetting)).state == "done"
        assert b"bob" not in log.read_bytes()


async def test_a_program_that_reads_the_journal_delays_its_cleaning(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(2))
        with closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM intake").fetchall()
            await forgetting_of(served).begin(ForgetSpec(key="bob"))
            card = await ended(forgetting_of(served))
        assert (card.state, "another program reads it" in card.reason) == ("failed", True)
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        assert (await ended(forgetting_of(served))).state == "done"
        assert b"traj-0-bob-0" not in b"".join(path.read_bytes() for path in (tmp_path / "run").glob("journal.sqlite*"))


async def test_a_rebuilt_policy_that_an_earlier_version_has_gets_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """Otherwise a restart would not know the version that has sampled since."""
    async with run(tmp_path, checkpointing__interval=1) as served:
        await teach(served, range(2), of_bob)
        await teach(served, range(2, 3), lambda one: one.owner != "bob")
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        assert (await ended(forgetting_of(served))).state == "done"
        live, learnt = training_of(served).status().current, await policy(served)
        await give(served, 3, "ann")
    async with run(tmp_path, checkpointing__interval=1) as served:
        assert training_of(served).status().current == live
        assert equal(await policy(served), learnt)
        assert training_of(served).loop().waiting == 4


async def test_a_best_answer_that_no_update_took_is_not_remembered(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        for key in ("ann", "bob"):
            group = trajectories(served, 0, key)
            await training_of(served).trajectories.collect_episodes(
                group, {one.collection.episode_id: 1.0 for one in group}
            )
        plateau = training_of(served).loop().training.plateau
        training_of(served).loop().wake()
        assert {one[:10] for one in plateau.remembered_ids} == {"traj-0-ann", "traj-0-bob"}
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        await ended(forgetting_of(served))
        assert {one[:10] for one in plateau.remembered_ids} == {"traj-0-ann"}


async def test_groups_and_episodes_of_the_same_ids_are_each_keys_own(tmp_path: Path) -> None:
    """And what a key sends after it was forgotten stays."""

    def named(key: str, group_id: str, update: int = 0) -> list[Trajectory]:
        episodes = enumerate(trajectories(served, update, key))
        spec = CollectionSpec(group_id=group_id)
        return [
            replace(one, group_id=group_id, collection=replace(spec, episode_id=f"e{number}"))
            for number, one in episodes
        ]

    async with run(tmp_path, **RARELY) as served:
        collector = training_of(served).trajectories
        for key in ("ann", "bob"):
            await collector._add(named(key, "same"))
            await collector.enter(EpisodeReward("e0", "same", 0.5, key))
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        await collector._add([replace(one, created=one.created + 1e10) for one in named("bob", "later", 1)])
        await collector.enter(EpisodeReward("e1", "later", 0.25, "bob"))
        assert (await ended(forgetting_of(served))).state == "done"
        await collector.enter(Closed("same", "ann"))
    async with run(tmp_path, **RARELY) as served:
        found = {one.trajectory_id: member.reward for one, member in training_of(served).trajectories.buffer.newest(99)}
        assert found["traj-0-ann-0"] == 0.5
        assert "traj-0-bob-0" not in found
        assert found["traj-1-bob-1"] == 0.25


def test_commits_of_clients_come_between_the_parts_of_a_large_removal() -> None:
    forgotten = Forgotten(ForgetSpec(key="bob"), frozenset(map(str, range(1000))), frozenset(range(250)))
    parts = [rows for statements in removal(forgotten) for _, rows in statements]
    assert max(map(len, parts)) <= 100
    assert sum(map(len, parts)) == 2 * 1000 + 250


async def test_a_copy_that_an_opinion_makes_meanwhile_is_forgotten_too(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY, rl_training__max_staleness=1) as served:
        collector, forgetting = training_of(served).trajectories, forgetting_of(served)
        await teach(served, range(1))
        await collector._add(
            [
                replace(one, collection=replace(one.collection, scorer=None, episode_id=""))
                for one in trajectories(served, 7, "bob")
            ]
        )
        await teach(served, range(1, 5))
        await forgetting.begin(ForgetSpec(key="bob"))
        while forgetting.card.done < 2:
            await asyncio.sleep(0)
        assert (await collector.feedback("traj-7-bob-0", 1.0, "somebody")).late
        assert forgetting.card.state == "rebuilding"
        assert (await ended(forgetting)).state == "done"
        assert not [one for one, _ in collector.buffer.newest(99) if one.owner == "bob"]
        found = "SELECT 1 FROM intake i, ends e WHERE i.trajectory_id LIKE '%bob%' OR e.trajectory_id LIKE '%bob%'"
        assert not await training_of(served).parts.journal.read(lambda file: file.rows(found))
        training_of(served).check_integrity()
