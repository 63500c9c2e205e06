"""An adapter that was rebuilt without something is, to the bit, the one of a run that never had it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from extras.forgetting.forgetting_rig import ended, equal, forgetting_of, give, policy, run, teach, training_of

from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.errors import ConflictError, InvalidRequestError, StorageError, UnknownTrajectoryError
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec, Forgotten
from mlx_parallm.extras.forgetting.plan import plan, unknown
from mlx_parallm.rl.runs.records import PolicyChange, Start, Update
from mlx_parallm.rl.runs.store import JournalFile, Statements

RARELY = {"checkpointing__interval": 4}
REDUCED = Update((), None, True, 1, "published", 1, reduced=True, owners=("ann", "bob"))
BODIES = (Start(), REDUCED, Update((), None, True, 2, "published", 2))


@pytest.mark.parametrize(
    ("spec", "is_left_out"),
    [
        (ForgetSpec(key="bob"), lambda one: one.owner == "bob"),
        (
            ForgetSpec(trajectory_ids=("traj-2-ann-1", "traj-5-eve-0")),
            lambda one: one.trajectory_id in ("traj-2-ann-1", "traj-5-eve-0"),
        ),
        (ForgetSpec(since=1003.0, until=1005.0), lambda one: one.created in (1003.0, 1004.0)),
    ],
    ids=["key", "trajectories", "time"],
)
async def test_it_equals_a_run_that_never_had_it(tmp_path: Path, spec: ForgetSpec, is_left_out) -> None:
    async with run(tmp_path, "control", **RARELY) as served:
        await teach(served, range(7), is_left_out)
        control = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(7))
        with_all = await policy(served)
        forgetting = forgetting_of(served)
        plan = await forgetting.plan(spec)
        assert [part.problem for part in plan.adapters] == [""]
        await forgetting.begin(spec)
        assert (await ended(forgetting)).state == "done", forgetting.card
        assert equal(await policy(served), control)
        assert not equal(await policy(served), with_all)
        training_of(served).check_integrity()


async def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    """Not in the journal, the trajectory log, checkpoints, versions or memory; and what waits is not learnt from."""
    log = tmp_path / "log.jsonl"
    async with run(tmp_path, checkpointing__interval=2, rl_training__trajectory_log=log) as served:
        training, forgetting = training_of(served), forgetting_of(served)
        await teach(served, range(5))
        await give(served, 5, "bob")
        await give(served, 5, "ann")
        plan = await forgetting.plan(ForgetSpec(key="bob"))
        (part,) = plan.adapters
        assert (part.trajectories, part.updates, part.log_lines) == (24, 5, 20)
        assert part.removed == tuple(card.name for card in training.parts.checkpoints.cards("default"))
        await forgetting.begin(ForgetSpec(key="bob"))
        assert (await ended(forgetting)).state == "done"
        rebuilt = training.status().current
        assert [str(card.ref) for card in served.adapters.cards()] == [str(rebuilt)]
        assert [card.adapter for card in training.parts.checkpoints.cards("default")] == [rebuilt]
        waiting = {one.trajectory_id for one, _ in training.trajectories.buffer.newest(1000)}
        assert not any("bob" in one for one in waiting)
        assert "traj-5-ann-0" in waiting
        report = await training.update()
        assert (report.status, report.metrics["trajectories"]) == ("published", 4.0)
        training.check_integrity()
    kept = b"".join(path.read_bytes() for path in [log, *(tmp_path / "run").glob("journal.sqlite*")])
    assert b"bob" not in kept
    assert kept.count(b"traj-0-ann-0") > 0


async def test_a_rebuilt_adapter_learns_on_and_is_rebuilt_again(tmp_path: Path) -> None:
    controls: dict[str, dict[str, object]] = {}

    def of_bob(one: Trajectory) -> bool:
        return one.owner == "bob" and one.created < 1004

    for name, is_left_out in (("control", of_bob), ("neither", lambda one: one.owner == "eve" or of_bob(one))):
        async with run(tmp_path, name, **RARELY) as served:
            await teach(served, range(6), is_left_out)
            controls[name] = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(4))
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        await ended(forgetting_of(served))
        await teach(served, range(4, 6))
    async with run(tmp_path, **RARELY) as served:
        assert equal(await policy(served), controls["control"]), "also after a restart"
        await forgetting_of(served).begin(ForgetSpec(key="eve"))
        await ended(forgetting_of(served))
        assert equal(await policy(served), controls["neither"])


async def test_a_process_that_ends_on_the_way_goes_on_at_the_next_start(tmp_path: Path) -> None:
    async with run(tmp_path, "control", **RARELY) as served:
        await teach(served, range(6), lambda one: one.owner == "bob")
        control = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(6))
        live = training_of(served).status().current
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        while forgetting_of(served).card.done < 2:
            await asyncio.sleep(0)
        assert training_of(served).status().current == live
    async with run(tmp_path, **RARELY) as served:
        assert (await ended(forgetting_of(served))).state == "done"
        assert equal(await policy(served), control)
    async with run(tmp_path, **RARELY) as served:
        assert forgetting_of(served).card.state == "none", "it is not done twice"
        assert equal(await policy(served), control)


async def test_the_journal_is_not_closed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would end the process."""
    reads, reading, trajectories = [], threading.Event(), JournalFile.trajectories

    def slow(file: JournalFile, ids: Sequence[str]) -> dict[str, Trajectory]:
        reading.set()
        time.sleep(0.5)
        reads.append(file._connection is not None)
        return trajectories(file, ids)

    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(6))
        monkeypatch.setattr(JournalFile, "trajectories", slow)
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        await asyncio.to_thread(reading.wait, 60)
    assert reads
    assert all(reads)


@pytest.mark.parametrize("failing", ["commit", "removal"])
async def test_a_disk_that_fails_leaves_all_of_it_or_the_removal_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async with run(tmp_path, "control", **RARELY) as served:
        await teach(served, range(5), lambda one: one.owner == "bob")
        control = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(5))
        before, live = await policy(served), training_of(served).status().current
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        with monkeypatch.context() as patched:
            _fail(patched, failing)
            card = await ended(forgetting_of(served))
        assert (card.state, "disk full" in card.reason) == ("failed", True)
        done = failing == "removal"
        assert equal(await policy(served), control if done else before)
        assert (training_of(served).status().current == live) is not done
        assert (await training_of(served).update()).status == "skipped", "training goes on"
    async with run(tmp_path, **RARELY) as served:
        assert (await ended(forgetting_of(served))).state == "done"
        assert equal(await policy(served), control)
        cards = training_of(served).parts.checkpoints.cards("default")
        assert {card.adapter for card in cards} == {training_of(served).status().current}


def _fail(patched: pytest.MonkeyPatch, failing: str) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageError("disk full")

    if failing == "removal":
        patched.setattr(CheckpointStore, "remove", full)
        return
    commit = JournalFile.commit

    def commit_unless_rebuilt(file: JournalFile, statements: Statements) -> None:
        if any(row[3] == "rollback" for _, rows in statements for row in rows if len(row) == 5):
            full()
        commit(file, statements)

    patched.setattr(JournalFile, "commit", commit_unless_rebuilt)


async def test_from_scratch_leaves_out_what_later_versions_have_sampled(tmp_path: Path) -> None:
    async with run(tmp_path, "control", **RARELY) as served:
        await teach(served, range(2))
        await give(served, 2, "ann")
        await give(served, 2, "eve")
        await training_of(served).update()
        control = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(5))
        await give(served, 5, "ann")
        spec = ForgetSpec(trajectory_ids=tuple(f"traj-2-bob-{number}" for number in range(4)), from_scratch=True)
        await forgetting_of(served).begin(spec)
        assert (await ended(forgetting_of(served))).state == "done"
        assert equal(await policy(served), control)
        assert training_of(served).loop().waiting == 0, "what waited came from such a version"


async def test_what_people_had_rolled_back_is_not_learnt_and_an_evaluation_below_the_floor_holds(
    tmp_path: Path,
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    gated = {"rl_training__evaluation__tasks": str(tasks), "rl_training__evaluation__every": 100}
    floor = {"rl_training__gate__eval_floor": 0.5, "rl_training__max_completion_tokens": 2}
    async with run(tmp_path, "control", **RARELY) as served:
        await teach(served, range(2), lambda one: one.owner == "bob")
        control = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(2))
        await training_of(served).save(None, None, ["good"], {})
        await teach(served, range(2, 4))
        await training_of(served).rollback(None, "good")
        before = await policy(served)
    async with run(tmp_path, **RARELY, **gated, **floor) as served:
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        card = await ended(forgetting_of(served))
        assert (card.state, "below eval_floor" in card.reason) == ("held", True)
        assert equal(await policy(served), before)
        await forgetting_of(served).begin(ForgetSpec(key="bob"), ignore_floor=True)
        assert (await ended(forgetting_of(served))).state == "done"
        assert equal(await policy(served), control)


async def test_data_given_with_updates_is_its_keys(tmp_path: Path) -> None:
    def given(key: str, token: int) -> tuple[GivenTrajectory, ...]:
        return tuple(GivenTrajectory((5, 6), (token + one, 9), float(one), owner=key) for one in range(2))

    async with run(tmp_path, "control", **RARELY) as served:
        for number in range(3):
            await training_of(served).update(given=given("ann", 20 + number))
        control = await policy(served)
    async with run(tmp_path, **RARELY) as served:
        for number in range(3):
            both = (*given("ann", 20 + number), *(replace(one, group_id="b") for one in given("bob", 50 + number)))
            await training_of(served).update(given=both)
        (part,) = (await forgetting_of(served).plan(ForgetSpec(key="bob"))).adapters
        assert (part.trajectories, part.updates) == (0, 3)
        await forgetting_of(served).begin(ForgetSpec(key="bob"))
        assert (await ended(forgetting_of(served))).state == "done"
        assert equal(await policy(served), control)


async def test_what_cannot_be_forgotten_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        forgetting = forgetting_of(served)
        await teach(served, range(1))
        assert (await forgetting.plan(ForgetSpec(key="nobody"))).adapters == ()
        with pytest.raises(UnknownTrajectoryError, match="traj-9"):
            await forgetting.begin(ForgetSpec(trajectory_ids=("traj-9",)))
        with pytest.raises(InvalidRequestError, match="a key, trajectory_ids, or a time"):
            ForgetSpec(key="ann", since=0.0)


def test_an_update_whose_data_were_removed_names_what_keeps_them() -> None:
    made = [PolicyChange("main", number, float(number), body) for number, body in enumerate(BODIES, 1)]
    with pytest.raises(ConflictError, match=r"updates 2 to 2 have learnt from is gone .*--journal-updates"):
        plan("main", made, (), Forgotten(ForgetSpec(key="bob"), frozenset()))
    assert plan("main", made, (), Forgotten(ForgetSpec(key="eve"), frozenset())) is None


def test_updates_that_are_not_known_any_more_are_counted() -> None:
    def of(first: int, *bodies: Start | Update) -> list[PolicyChange]:
        return [PolicyChange("main", number, float(number), body) for number, body in enumerate(bodies, first)]

    whole = Update((), None, True, 2, "published", 2)
    assert unknown(of(1, *BODIES), ForgetSpec(key="bob")) == 0
    assert unknown(of(1, Start(), replace(REDUCED, owners=None), whole), ForgetSpec(key="bob")) == 1
    assert unknown(of(501, whole, whole), ForgetSpec(key="bob")) == 500
    assert unknown(of(501, whole, whole), ForgetSpec(since=400.0)) == 500
    assert unknown(of(501, whole, whole), ForgetSpec(since=501.0)) == 0
