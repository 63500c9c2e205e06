"""The journal of a run: what is in it after any crash, and what it refuses."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl.fakes import trajectories

from mlx_parallm.adapters.runs import COMMITS
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ConfigError, StorageError
from mlx_parallm.rl.runs.journal import Journal, changed
from mlx_parallm.rl.runs.records import (
    Arrival,
    Closed,
    EpisodeReward,
    Feedback,
    GroupEntry,
    PolicyChange,
    Rollback,
    Score,
    Start,
    TokenRewards,
    TrainedEpisode,
    TrainedGroup,
    Update,
    body_from_json,
    body_to_json,
    trajectory_from_json,
    trajectory_to_json,
)
from mlx_parallm.rl.runs.store import JournalFile

REF = AdapterRef("math", 3)
TRAINED = TrainedGroup((TrainedEpisode(("a-0",)), TrainedEpisode(("a-1",))), (1.0, 0.0), "exact")
UPDATE = Update((TRAINED,), 2, True, 4, "published", 1, {"loss": 0.5})
GIVEN = TrainedEpisode((), ((0.5, 0.25),), (GivenTrajectory((1,), (2, 3), 1.0),))
ONE_ROW = GivenTrajectory((1,), (2, 3), mask=(True, False), advantages=(1 / 3, 0.0), episode_id="e")
ROW = TrainedEpisode(given=(ONE_ROW,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


async def reopened(path: Path) -> list[list[str] | GroupEntry]:
    """What waits: for each arrival the ids of its trajectories, and what came between them."""
    journal = Journal(JournalFile(path))
    entries = await journal.read(lambda file: file.waiting("math"))
    await journal.close()
    return [
        [one.trajectory_id for one in entry.trajectories] if isinstance(entry, Arrival) else entry for entry in entries
    ]


# ---- what is kept -------------------------------------------------------------------------------


@given(
    st.lists(st.floats(allow_nan=True), max_size=5),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.lists(st.text(max_size=3), max_size=2)),
)
@settings(max_examples=50, deadline=None)
def test_a_trajectory_is_read_back_as_it_was_to_the_bit(logprobs: list[float], text: str, metadata: dict) -> None:
    one = replace(
        trajectories("g", REF)[0],
        sampling_logprobs=tuple(logprobs),
        text=text,
        collection=CollectionSpec("exact", metadata, messages=({"role": "user", "content": text},)),
    )
    again = trajectory_from_json(trajectory_to_json(one))
    assert repr(again) == repr(one), "NaN is not equal to itself"


def test_text_that_is_no_unicode_is_kept_as_far_as_it_can_be() -> None:
    broken = replace(trajectories("g", REF)[0], collection=CollectionSpec("exact", {"answer": "a\ud800b"}))
    assert trajectory_from_json(trajectory_to_json(broken)).collection.metadata == {"answer": "a?b"}


@pytest.mark.parametrize(
    "body",
    [
        Start("math@3"),
        Rollback("checkpoint-7"),
        replace(UPDATE, metrics={"kl": math.inf}, progress={"run_steps": 3.0}),
        replace(UPDATE, groups=(TrainedGroup((GIVEN,), (1.0,), "given"), TrainedGroup((ROW,), (), "given"))),
        Feedback("a-0", 0.1),
        TokenRewards("a-0", (0.1, -0.2)),
        EpisodeReward("e", "", 1.0),
        Score("a-0", 1 / 3),
        Closed("g"),
    ],
)
def test_an_entry_is_read_back_as_it_was(body: GroupEntry | Start | Rollback | Update) -> None:
    assert body_from_json(*body_to_json(body)) == body


# ---- crashes ------------------------------------------------------------------------------------

_WRITES = """
import asyncio, sys
from pathlib import Path
from rl.fakes import trajectories
from mlx_parallm.core.adapters import (AdapterRef)
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.runs.store import JournalFile

async def main():
    journal = Journal(JournalFile(Path(sys.argv[1])))
    async def client(name):
        for number in range(10_000):
            group = f"{name}{number}"
            await journal.accept("math", trajectories(group, AdapterRef("math", 3)))
            print("accepted", group, flush=True)
            await journal.entered("math", group, Feedback(f"{group}-0", float(number)))
            print("scored", group, number, flush=True)
    await asyncio.gather(*map(client, "abcd"))

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 60, 300])
async def test_a_process_that_is_killed_loses_nothing_that_it_has_acknowledged(path: Path, after: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _WRITES, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        lines += [line.split() for line in process.stdout if line.endswith("\n")]
    found = await reopened(path)
    arrived = [entry for entry in found if isinstance(entry, list)]
    assert all(len(ids) == 2 for ids in arrived), "a group is there with all its members"
    groups = {ids[0].removesuffix("-0") for ids in arrived}
    for words in lines:
        if words[0] == "accepted":
            assert words[1] in groups
        else:
            assert Feedback(f"{words[1]}-0", float(words[2])) in found


# ---- faults -------------------------------------------------------------------------------------


FULL = "the journal of the run cannot be written: database or disk is full"


class Refusing(JournalFile):
    """`error`: what a commit raises."""

    error: Exception | None = None

    def commit(self, statements) -> None:
        if self.error is not None:
            raise self.error
        super().commit(statements)


async def test_what_cannot_be_written_costs_only_itself(path: Path) -> None:
    journal = Journal(JournalFile(path))
    endless: dict[str, object] = {}
    endless["self"] = endless
    bad = [replace(one, collection=CollectionSpec("exact", endless)) for one in trajectories("a", REF)]
    done = await asyncio.gather(
        journal.accept("math", bad), journal.accept("math", trajectories("b", REF)), return_exceptions=True
    )
    assert isinstance(done[0], StorageError)
    assert done[1] is None
    await journal.close()
    assert await reopened(path) == [["b-0", "b-1"]]


async def test_after_the_end_nothing_more_is_promised(path: Path) -> None:
    journal = Journal(JournalFile(path))
    await journal.close()
    await journal.close()
    with pytest.raises(StorageError, match="ended"):
        await journal.entered("math", "a", Feedback("a-0", 1.0))


def test_a_journal_of_a_newer_version_is_refused(path: Path) -> None:
    JournalFile(path).commit([])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(ConfigError, match=r"newer version.*schema is 9"):
        JournalFile(path)


def test_a_journal_of_another_model_is_refused(path: Path) -> None:
    """Its token ids would mean other text."""
    JournalFile(path, "llama-1").commit([])
    JournalFile(path, "llama-1").close()
    with pytest.raises(ConfigError, match=r"another base model \(llama-1, and qwen-2 is served\)"):
        JournalFile(path, "qwen-2")
    JournalFile(path, read_only=True).close()


def test_a_file_without_tables_is_a_journal_that_nothing_was_written_to(path: Path) -> None:
    """As a process leaves it that is killed while it makes the file."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    assert path.stat().st_size
    assert JournalFile(path, read_only=True).newest_changes(1) == ()
    assert JournalFile(path, read_only=True).changes_since("math", 0) == ()
    file = JournalFile(path)
    file.commit([])
    file.close()
    assert JournalFile(path, read_only=True).newest_changes(1) == ()


def test_the_newest_change_is_the_one_that_was_written_last(path: Path) -> None:
    """Though the clock was ahead before."""
    file = JournalFile(path)
    for adapter, number, at in (("math", 1, 9e9), ("tone", 7, 2.0), ("math", 2, 3.0)):
        file.commit(changed(PolicyChange(adapter, number, at, Start("")), {}))
    assert [(one.adapter, one.number) for one in file.newest_changes(2)] == [("math", 2), ("tone", 7)]


def test_a_file_of_something_else_is_refused_and_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(ConfigError, match="not the journal of a run"):
        JournalFile(path)
    assert path.read_bytes() == content
    path.write_text("not a database " * 100)
    with pytest.raises(ConfigError, match="damaged"):
        JournalFile(path)


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE about SET value = ? WHERE name = 'commits'", "many"),
        ("DELETE FROM about WHERE name = ?", "model"),
        ("UPDATE about SET value = ? WHERE name = 'trained'", "null"),
        *(
            ("UPDATE changes SET body = ?", body)
            for body in ("true", "[" * 50_000, '{"progress": 3}', '{"version": "x"}')
        ),
        ("UPDATE changes SET body = json_set(body, '$.version', ?)", math.inf),
        ("UPDATE intake SET body = ?", "{}"),
    ],
)
async def test_rows_of_another_form_are_damage(path: Path, statement: str, value: object) -> None:
    """SQLite's own checks do not see it."""
    journal = Journal(JournalFile(path, "llama-1"))
    await journal.accept("math", trajectories("a", REF))
    await journal.changed(PolicyChange("math", 1, 1.0, Start("math@3")))
    await journal.changed(PolicyChange("math", 2, 2.0, replace(UPDATE, groups=())))
    journal.trains(["math"])
    await journal.close()
    with sqlite3.connect(path) as connection:
        connection.execute(statement, (value,))
    connection.close()
    with pytest.raises(ConfigError, match="damaged"):  # noqa: PT012 - which of these reads it
        file = JournalFile(path, "llama-1")
        try:
            file.trained()
            file.waiting("math")
            file.newest_version("math")
            file.progress("math")
            file.has_all_progress("math")
        finally:
            file.close()


def flipped(content: bytes) -> bytes:
    return bytes(255 - byte if place % 97 == 96 else byte for place, byte in enumerate(content))


async def killed(path: Path, moved: int, in_wal: int) -> dict[str, bytes]:
    """The files of a process that was killed after so many commits, of which the first were moved out of the WAL."""
    file = JournalFile(path)
    journal = Journal(file)
    for number in range(moved + in_wal):
        await journal.accept("math", trajectories(f"g{number}", REF))
        if number + 1 == moved:
            file.move_into_place()
    files = {one.name: one.read_bytes() for one in path.parent.iterdir() if not one.name.endswith("-shm")}
    await journal.close()
    for one in path.parent.iterdir():
        one.unlink()
    return files


JOURNAL_NAME, WAL_NAME = "journal.sqlite", "journal.sqlite-wal"
DAMAGES: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "every 97th byte of both": lambda files: {name: flipped(data) for name, data in files.items()},
    "every 97th byte of the WAL": lambda files: {WAL_NAME: flipped(files[WAL_NAME])},
    "every 97th byte of the main file": lambda files: {JOURNAL_NAME: flipped(files[JOURNAL_NAME]), WAL_NAME: b""},
    "no WAL": lambda files: {WAL_NAME: b""},
    "the beginning of a WAL": lambda files: {WAL_NAME: files[WAL_NAME][: len(files[WAL_NAME]) // 20]},
    "no main file": lambda files: {JOURNAL_NAME: b""},
    "neither": lambda files: {JOURNAL_NAME: b"", WAL_NAME: b""},
    "half a main file and no WAL": lambda files: {
        JOURNAL_NAME: files[JOURNAL_NAME][: len(files[JOURNAL_NAME]) // 2],
        WAL_NAME: b"",
    },
}


@pytest.mark.parametrize("emptied", [True, False])
@pytest.mark.parametrize(("moved", "in_wal"), [(0, 1), (20, 3)])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_killed_run_whose_journal_is_gone_or_cut_does_not_start(
    path: Path, damage: str, moved: int, in_wal: int, emptied: bool
) -> None:
    """Whether the files are empty or missing; and what is refused stays as it is, so that it can be repaired."""
    files = await killed(path, moved, in_wal)
    count = files.pop(COMMITS)
    left = {**files, **DAMAGES[damage](files)}
    for name, data in left.items():
        if data or emptied:
            (path.parent / name).write_bytes(data)
    path.with_name(COMMITS).write_bytes(count)
    with pytest.raises(ConfigError, match=r"(?s)journal\.sqlite .*[Rr]estore .*from a backup"):
        JournalFile(path)
    for name, data in left.items():
        if data:
            assert (path.parent / name).read_bytes() == data
    with pytest.raises(ConfigError, match=r"journal\.sqlite"):
        JournalFile(path, read_only=True).newest_changes(1)
    for name, data in files.items():
        (path.parent / name).write_bytes(data)
    (path.parent / f"{JOURNAL_NAME}-shm").unlink(missing_ok=True)
    assert len(await reopened(path)) == moved + in_wal, "unharmed, it is recovered"


async def test_what_is_left_of_a_cut_journal_is_used_if_the_operator_says_so(path: Path) -> None:
    files = await killed(path, 2, 2)
    path.write_bytes(files[JOURNAL_NAME])
    path.with_name(COMMITS).write_bytes(files[COMMITS])
    with pytest.raises(ConfigError, match=r"has 2 of at least 4 commits.*remove run\.commits"):
        JournalFile(path)
    path.with_name(COMMITS).unlink()
    assert await reopened(path) == [["g0-0", "g0-1"], ["g1-0", "g1-1"]]


async def test_the_count_never_runs_ahead_of_the_journal(path: Path) -> None:
    """A full disk and a process that is killed are no damage."""
    file = Refusing(path)
    journal = Journal(file)
    await journal.accept("math", trajectories("a", REF))
    file.error = StorageError(FULL)
    with pytest.raises(StorageError):
        await journal.accept("math", trajectories("b", REF))
    file.error = None
    await journal.flush()
    assert path.with_name(COMMITS).read_text() == "1\n"
    await journal.close()
    path.with_name(COMMITS).write_text("")  # a power failure has left the file without its content
    assert await reopened(path) == [["a-0", "a-1"]]
    path.with_name(COMMITS).write_text("many\n")
    with pytest.raises(ConfigError, match=r"run\.commits is damaged"):
        JournalFile(path)


def test_nobody_else_may_read_the_prompts(path: Path) -> None:
    file = JournalFile(path)
    assert not path.exists(), "a run that has nothing to keep leaves no file"
    file.commit([])
    for kept in path.parent.iterdir():
        assert kept.stat().st_mode & 0o077 == 0, kept
    file.close()


async def test_a_torn_end_of_the_wal_loses_only_what_was_not_acknowledged(path: Path) -> None:
    file = JournalFile(path)
    journal = Journal(file)
    await journal.accept("math", trajectories("a", REF))
    wal = path.with_name(path.name + "-wal")
    kept, content = wal.read_bytes(), path.read_bytes()
    await journal.accept("math", [replace(one, text="b" * 50_000) for one in trajectories("b", REF)])
    torn = wal.read_bytes()
    await journal.close()
    assert len(torn) > len(kept)
    for cut in (len(kept) + 1, len(torn) - 5):  # a crash has left some pages of the second commit
        path.write_bytes(content)
        wal.write_bytes(torn[:cut])
        path.with_name(COMMITS).write_text("1\n")
        assert await reopened(path) == [["a-0", "a-1"]]


@pytest.mark.parametrize("error", [StorageError(FULL), MemoryError(), ConfigError("it is gone")], ids=repr)
async def test_whatever_a_commit_fails_with_costs_the_clients_that_wait_and_keeps_what_has_happened(
    path: Path, error: Exception
) -> None:
    file = Refusing(path)
    journal = Journal(file)
    await journal.accept("math", trajectories("a", REF))
    file.error = error
    async with asyncio.timeout(5):
        with pytest.raises(StorageError, match=r"cannot be written: (database|MemoryError|it is gone)"):
            await journal.accept("math", trajectories("b", REF))
    with pytest.raises(StorageError):
        await journal.entered("math", "a", Feedback("a-0", 1.0))
    journal.noted("math", "a", Score("a-0", 0.5))
    with pytest.raises(StorageError):
        await journal.changed(PolicyChange("math", 1, 1.0, Start("")))
    with pytest.raises(StorageError):
        await journal.flush()
    file.error = None
    await journal.flush()
    await journal.close()
    assert await reopened(path) == [["a-0", "a-1"], Score("a-0", 0.5)], "what was refused is not there"
    assert JournalFile(path).changes_since("math", 0) == (PolicyChange("math", 1, 1.0, Start("")),)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_error_of_the_disk_names_no_path(path: Path) -> None:
    file = JournalFile(path)
    file.commit([])
    file._connection.execute("PRAGMA max_page_count = 10")  # as good as a full disk, for SQLite
    row = ("a", "b", "math", "x" * 100_000)
    with pytest.raises(StorageError, match=r"the journal of the run cannot be written: .*full") as caught:
        file.commit([("INSERT INTO intake (adapter, group_id, kind, body) VALUES (?, ?, ?, ?)", [row])])
    assert str(path.parent) not in str(caught.value)
    file.commit([])
    file.close()


async def test_a_damaged_journal_is_told_and_not_passed_over(path: Path) -> None:
    journal = Journal(JournalFile(path))
    for number in range(40):
        await journal.accept("math", trajectories(f"g{number}", REF, n=8))
    await journal.close()
    content = bytearray(path.read_bytes())
    for page in range(3, len(content) // 4096):
        content[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged .*restore it from a backup"):
        JournalFile(path)


async def test_a_change_that_cannot_be_is_damage_too(path: Path) -> None:
    journal = Journal(JournalFile(path))
    await journal.changed(PolicyChange("math", 1, 0.0, Rollback("checkpoint-1", ("math@1",), rebuilt=1)))
    await journal.close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE changes SET body = json_set(body, '$.lineage', json('[]'))")
    with pytest.raises(ConfigError, match="damaged"):
        JournalFile(path).changes_since("math", 0)


def test_an_empty_file_that_a_crash_has_left_is_a_new_journal(path: Path) -> None:
    path.touch()
    JournalFile(path).commit([])
    assert JournalFile(path).changes_since("math", 0) == ()
