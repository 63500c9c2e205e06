"""What a compaction leaves in the journal: all that a start needs, whenever the process is killed."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rl.fakes import trajectories

from mlx_parallm.adapters.runs import COMMITS
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.runs.compaction import compaction
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import (
    Closed,
    PolicyChange,
    Score,
    Start,
    TrainedEpisode,
    TrainedGroup,
    Update,
    body_to_json,
)
from mlx_parallm.rl.runs.replay import StartPoint, plan
from mlx_parallm.rl.runs.store import JournalFile

REF = AdapterRef("math", 3)
UPDATES = 60
TOKENS = tuple(range(2000))


def group(number: int) -> TrainedGroup:
    episodes = tuple(TrainedEpisode((f"g{number}-{index}",)) for index in range(2))
    return TrainedGroup(episodes, (1.0, 0.0), "exact")


def change(number: int, *groups: TrainedGroup, **fields: object) -> PolicyChange:
    made = Update(groups or (group(number),), 2, True, number, "published", number, {"loss": 1 / number})
    return PolicyChange("math", number, float(number), replace(made, all_progress=True, **fields))


async def filled(path: Path) -> None:
    """60 updates of a group each, what was dropped between them, what waits, and preferences."""
    journal = Journal(JournalFile(path))
    journal.started(PolicyChange("math", 1, 1.0, Start("")))
    await journal.accept("math", trajectories("waits", REF), [Score("waits-0", 0.5)])
    await journal.accept("math", trajectories("preferences-1", REF))
    journal.dropped(["preferences-1-0", "preferences-1-1"], "replaced")
    for number in range(2, UPDATES + 2):
        members = [replace(one, completion_ids=TOKENS) for one in trajectories(f"g{number}", REF)]
        await journal.accept("math", members, [Score(f"g{number}-0", 1.0), Closed(f"g{number}")])
        await journal.accept("math", trajectories(f"old{number}", REF))
        await journal.changed(change(number, progress={"steps": float(number)}))
    await journal.close()
    with sqlite3.connect(path) as connection:  # as if each had been dropped when its update was made
        ended = [(float(number), f"old{number}-{at}") for number in range(2, UPDATES + 2) for at in (0, 1)]
        connection.executemany("INSERT INTO ends VALUES (?2, 'dropped', 'stale', ?1)", ended)
        connection.execute("UPDATE ends SET at = 1 WHERE trajectory_id LIKE 'preferences-%'")
    connection.close()


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    await filled(tmp_path / "journal.sqlite")
    return tmp_path / "journal.sqlite"


def finish(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def counts(path: Path) -> tuple[int, ...]:
    with sqlite3.connect(path) as connection:
        found = tuple(connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("intake", "ends"))
    connection.close()
    return found


def test_what_checkpoints_cover_is_removed_and_the_file_becomes_smaller(path: Path) -> None:
    before, file = path.stat().st_size, JournalFile(path)
    waiting = file.waiting("math")
    finish(compaction(file, "math", covered=50, keep=5))
    file.close()
    assert path.stat().st_size < before / 3
    file = JournalFile(path)
    assert file.waiting("math") == waiting
    kept = [one.number for one in file.changes_since("math", 0) if one.body.groups] if not waiting else []
    whole = [one.number for one in file.changes_since("math", 1)[1:] if not one.body.reduced]
    assert (kept, whole) == ([], [*range(51, 62)])
    assert [sorted(file.trajectories(one.body.trajectory_ids)) for one in file.changes_since("math", 50)[-2:]] == [
        ["g60-0", "g60-1"],
        ["g61-0", "g61-1"],
    ]
    assert file.fate("g50-0") is None
    assert file.fate("old50-1") is None
    assert file.fate("g51-0").state == "trained"
    assert len(file.groups("preferences-", "", 9)) == 1, "reward models learn from them"
    assert file.progress("math") == {"steps": 61.0}
    assert file.newest_version("math") == 61
    file.close()
    assert counts(path) == (2 + 1 + 2 + 11 * 6, 2 + 11 * 4)


def test_what_an_update_has_learnt_again_and_may_learn_again_stays(path: Path) -> None:
    file = JournalFile(path)
    remembering = change(62, group(62), replace(group(7), remembered=True))
    kind, body = body_to_json(remembering.body)
    file.commit([("INSERT INTO changes VALUES (?, ?, ?, ?, ?)", [("math", 62, 62.0, kind, body)])])
    finish(compaction(file, "math", covered=61, keep=0, needed={"g9-1"}))
    found = {one: file.fate(one) is not None for one in ("g7-0", "g7-1", "g8-0", "g9-0", "g9-1")}
    assert found == {"g7-0": True, "g7-1": True, "g8-0": False, "g9-0": False, "g9-1": True}
    file.close()


def test_a_kill_between_any_two_steps_leaves_a_journal_that_a_start_can_use(path: Path, tmp_path: Path) -> None:
    """What is whole can be made again, and what waits is there."""
    file = JournalFile(path)
    waiting = file.waiting("math")
    copies = 0
    for number, _ in enumerate(compaction(file, "math", covered=50, keep=0)):
        copy = tmp_path / str(number)
        copy.mkdir()
        for name in (path.name, f"{path.name}-wal", COMMITS):
            shutil.copy(path.with_name(name), copy / name)
        found = JournalFile(copy / path.name)
        assert found.waiting("math") == waiting
        for one in found.changes_since("math", 1)[1:]:
            ids = one.body.trajectory_ids
            assert one.body.reduced or len(found.trajectories(ids)) == len(ids) == 2
        found.close()
        copies += 1
    assert copies > 3
    file.close()


# ---- starts after a compaction -------------------------------------------------------------------


def test_what_a_checkpoint_misses_and_the_journal_too_is_lost_and_counted() -> None:
    """An older checkpoint than those that were there at the compaction."""
    reduced = [change(number, reduced=True) for number in (8, 9)]
    whole = [change(number) for number in (10, 11)]
    found = plan([*reduced, *whole], StartPoint("math@8", "checkpoint-8", 8))
    assert (found.updates, found.lost, found.is_new, found.last) == ((), 3, True, 11)
    assert plan(whole, StartPoint("math@8", "checkpoint-8", 8)).lost == 2, "they were removed"
    assert plan([*reduced, *whole], StartPoint("math@9", "checkpoint-9", 9)).updates == tuple(whole)


async def test_without_updates_dropped_answers_that_nobody_has_rewarded_do_not_fill_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(JournalFile(path), keep=1)
    await journal.accept("math", trajectories("waits", REF))
    await journal.accept("math", trajectories("preferences-1", REF))
    await journal.accept("math", trajectories("rewarded", REF), [Score("rewarded-0", 0.5), Score("rewarded-1", 0.5)])
    journal.dropped([f"{name}-{at}" for name in ("preferences-1", "rewarded") for at in (0, 1)], "zero_variance")
    for number in range(200):
        await journal.accept("math", trajectories(f"chat{number}", REF), [Closed(f"chat{number}")])
        journal.dropped([f"chat{number}-0", f"chat{number}-1"], "timeout")
    assert await journal.fate("chat199-1") is not None, "feedback for it may still come"
    assert await journal.fate("chat0-0") is None
    for name in ("waits", "preferences-1", "rewarded"):
        assert await journal.fate(f"{name}-1") is not None
    await journal.close()
    assert counts(path)[1] <= 4 + 100 + 3 * 12
