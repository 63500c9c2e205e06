"""JournalFile: the journal of a run on the disk, an SQLite database.

    intake    what came in, in order: trajectories, their rewards, groups that were closed
    ends      the trajectories that were trained on or dropped
    changes   of policies: updates, rollbacks, and where training started
    about     the base model that all of it was sampled from, which adapters are in training, the settings of updates

In WAL mode with synchronous=FULL, a commit returns when its rows are on the disk, and a crash at any moment leaves the
rows of whole commits. SQLite treats a damaged frame as the end of the WAL, and a WAL that is gone as an empty one, so
the journal counts its commits, and after each one the file `run.commits` beside it gets the number. A journal that
has fewer commits than that file says has lost some of them.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlx_parallm import atomic
from mlx_parallm.adapters.runs import COMMITS
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import MALFORMED, ConfigError, StorageError
from mlx_parallm.rl.runs.records import (
    Arrival,
    Fate,
    GroupEntry,
    LearningSettings,
    PolicyChange,
    body_from_json,
    names_from_json,
    progress_from_json,
    settings_from_json,
    trajectory_from_json,
)

SCHEMA = 1
"""Version of the tables, in the file's user_version."""

TRAJECTORY = "trajectory"
"""The kind of the rows of `intake` that are trajectories. Other rows have the kind of their entry."""

SETTINGS = "settings:"
"""What the names of rows of `about` begin with that have the settings of updates. Their digest follows."""

ERRORS = (sqlite3.Error, UnicodeError)
"""What SQLite raises. The second one: a message would quote damaged bytes, or an id is no text."""

_APPLICATION = 0x4D4C5850
"""application_id of the file: "MLXP"."""

_WAIT_S = 2.0
"""Longest wait for another program that holds the database's lock, such as a backup."""

_TABLES = (
    "CREATE TABLE intake (number INTEGER PRIMARY KEY, adapter TEXT NOT NULL, group_id TEXT NOT NULL, "
    "trajectory_id TEXT, kind TEXT NOT NULL, arrival TEXT, body TEXT NOT NULL)",
    f"CREATE UNIQUE INDEX one_of_each_trajectory ON intake (trajectory_id) WHERE kind = '{TRAJECTORY}'",
    "CREATE INDEX by_trajectory ON intake (trajectory_id)",
    "CREATE INDEX by_group ON intake (group_id)",
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE ends (trajectory_id TEXT PRIMARY KEY, state TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL) "
    "WITHOUT ROWID",
    "CREATE TABLE changes (adapter TEXT NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, PRIMARY KEY (adapter, number))",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
)
_LOSES = "which loses the trajectories that wait for training and the updates since the last checkpoint"

_log = logging.getLogger(__name__)


class CommitCount:
    """The file with the number of commits. It is not fsynced: after a power failure it may have an older number, and
    never one that is too high. It is no part of the journal, so that damage of one of the two shows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def read(self) -> int:
        """0 if there is none. Raises ConfigError, OSError."""
        try:
            text = self._path.read_bytes()[:20].split(b"\n")[0]
        except FileNotFoundError:
            return 0
        if text and not text.isdigit():
            raise ConfigError(
                f"{self._path} is damaged: restore it from a backup together with the journal, or remove it"
            )
        return int(text or 0)

    def write(self, number: int) -> None:
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            os.pwrite(self._descriptor, b"%d\n" % number, 0)  # never shorter than the number before
        except OSError as error:  # the commit itself is on the disk
            _log.debug("%s cannot be written: %s", self._path, error)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def connect(path: Path, model: str, least: int = 0, read_only: bool = False) -> tuple[sqlite3.Connection, int]:
    """A connection, and the number of the last commit. Raises ConfigError: it is less than `least`, or see
    `JournalFile`. A file that is refused stays as it is, with its WAL."""
    if path.exists():
        looking = _open(path, "ro")
        try:
            commits = _check(looking, path, model, least, thoroughly=not read_only)
        except BaseException:  # an interrupt too: the file must not stay open
            looking.close()
            raise
        if read_only:
            return looking, commits
        looking.close()
    else:
        commits = 0
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # prompts and answers are in it
    atomic.sync(path.parent)
    connection = _open(path, "rw")
    try:
        _prepare(connection, model)
    except BaseException:  # an interrupt too: the file must not stay open
        connection.close()
        raise
    return connection, commits


def _open(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, timeout=_WAIT_S, isolation_level=None, check_same_thread=False, uri=True)


def _check(connection: sqlite3.Connection, path: Path, model: str, least: int, thoroughly: bool) -> int:
    """The number of the last commit. Raises ConfigError; sqlite3.OperationalError: of the disk, not the content."""
    try:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (schema,) = connection.execute("PRAGMA user_version").fetchone()
        if tables and application != _APPLICATION:
            raise ConfigError(f"{path} is not the journal of a run: move it away, or name another --checkpoint-dir")
        if schema > SCHEMA:
            raise ConfigError(
                f"{path} was written by a newer version of MLX ParaLLM (its schema is {schema}, and this version reads "
                f"{SCHEMA}): use that version, or name another --checkpoint-dir"
            )
        about = dict(connection.execute("SELECT name, value FROM about").fetchall()) if tables else {}
        if (commits := int(about.get("commits", 0))) < least:
            raise lost(path, commits, least)
        if not (tables and thoroughly):
            return commits
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise damaged(path, str(found))
        if model not in ("", of_model := about["model"]):
            raise ConfigError(
                f"{path} is the journal of a run on another base model ({of_model}, and {model} is served): serve that "
                "model, or name another --checkpoint-dir"
            )
        return commits
    except sqlite3.OperationalError:
        raise
    except (*ERRORS, *MALFORMED) as error:  # the others: of what `about` should have
        raise damaged(path, reason_of(error)) from error


def _prepare(connection: sqlite3.Connection, model: str) -> None:
    """Makes the tables if the file is new, copies all rows into the main file, and makes that smaller if most of it is
    free."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file, or after VACUUM
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON").fetchall()  # what is removed is not left in the file
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables:
        with transaction(connection):
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute("INSERT INTO about (name, value) VALUES ('model', ?)", (model,))
    ((pages, free),) = connection.execute("SELECT * FROM pragma_page_count, pragma_freelist_count").fetchall()
    if 2 * free > pages:  # an older version made the file, or a compaction was cut short; it copies the other pages
        with suppress(sqlite3.Error):  # without room for the copy, the free pages are used for new rows
            connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:  # an interrupt too: the transaction must not stay open
        with suppress(sqlite3.Error):  # a failed commit may have ended the transaction already
            connection.execute("ROLLBACK")
        raise


def _version(stored: object) -> int:
    """The number of a version. Raises ValueError: it is none."""
    if not isinstance(stored, int) or stored < 0:
        raise ValueError(f"a version has the number {str(stored)[:20]!a}")
    return stored


def damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({' '.join(reason.split())}): restore it from a backup; or move it away together "
        f"with {path.name}-wal and {COMMITS}, {_LOSES}"
    )


def lost(path: Path, commits: int, least: int) -> ConfigError:
    what = f"has {commits} of at least {least} commits" if path.exists() else f"is gone, with at least {least} commits"
    return ConfigError(
        f"{path} {what}, as {COMMITS} beside it says: it or {path.name}-wal was damaged, cut or removed. Restore all "
        f"three from a backup; or remove {COMMITS} to resume from what remains, {_LOSES}"
    )


def unwritable(error: Exception) -> StorageError:
    return StorageError(f"the journal of the run cannot be written: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """The error's text without a path."""
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


# ---- reading and writing --------------------------------------------------------------------------

Statements = Sequence[tuple[str, Sequence[tuple[object, ...]]]]
"""SQL with placeholders, each with the rows that it is executed for."""

T = TypeVar("T")

_IDS_AT_A_TIME = 500
_NOT_ENDED = "NOT EXISTS (SELECT 1 FROM ends e WHERE e.trajectory_id = {}.trajectory_id)"
_WAITING = (
    "SELECT i.kind, i.arrival, i.body FROM intake i WHERE i.adapter = ?1 "
    f"AND (i.trajectory_id IS NULL OR {_NOT_ENDED.format('i')}) "
    f"AND i.group_id IN (SELECT t.group_id FROM intake t WHERE t.kind = '{TRAJECTORY}' AND t.adapter = ?1 "
    f"AND {_NOT_ENDED.format('t')}) ORDER BY i.number"
)
_GROUPS = (
    f"SELECT i.group_id, i.body FROM intake i WHERE i.kind = '{TRAJECTORY}' AND i.group_id IN ("
    f"SELECT t.group_id FROM intake t LEFT JOIN ends e USING (trajectory_id) WHERE t.kind = '{TRAJECTORY}' "
    "AND t.group_id BETWEEN ?1 AND ?2 AND coalesce(e.reason, '') != ?3 "
    "GROUP BY t.group_id ORDER BY max(t.number) DESC LIMIT ?4) ORDER BY i.number"
)
_COUNTED = "INSERT OR REPLACE INTO about (name, value) VALUES ('commits', ?)"
_CHANGES = "SELECT adapter, number, at, kind, body FROM changes"
_UPDATES = "SELECT body FROM changes WHERE adapter = ? AND kind = 'update' ORDER BY number DESC"
_NEWEST_VERSION = (
    "SELECT json_extract(body, '$.version') AS version, number FROM changes "
    "WHERE adapter = ? AND kind = 'update' AND version IS NOT NULL ORDER BY number DESC LIMIT 1"
)
_LAST_REPLACED = "SELECT coalesce(max(number), 0) FROM changes WHERE adapter = ? AND kind != 'update'"
_COUNT_TRAJECTORIES = f"SELECT count(*) FROM intake WHERE adapter = ? AND kind = '{TRAJECTORY}'"
_FORGET = (
    "DELETE FROM ends WHERE trajectory_id IN "
    "(SELECT trajectory_id FROM intake WHERE adapter = ? AND trajectory_id IS NOT NULL)",
    "DELETE FROM intake WHERE adapter = ?",
    "DELETE FROM changes WHERE adapter = ?",
)
_ANY_TABLE = "SELECT 1 FROM sqlite_master LIMIT 1"
_FEW_PAGES = 2048
LINEAGE_CHANGES = 1000
"""Changes before the start of a replay that it reads: they have the lineage and the metrics of updates."""


class JournalFile:
    """One journal. Its file is made by the first commit. Calls must not overlap; they may come from any thread.

    Args:
        model: the fingerprint of the base model that is served; empty: of any model.
        read_only: nothing is written, and another process may be writing to it.

    Raises:
        ConfigError: the file is damaged, is not a journal, is that of another base model, or was written by a newer
            version of this package.
    """

    def __init__(self, path: Path, model: str = "", read_only: bool = False) -> None:
        self._path = path
        self._model = model
        self._connection: sqlite3.Connection | None = None
        self._commits = 0
        self._count = CommitCount(path.with_name(COMMITS))
        try:
            least = self._count.read()
            if path.exists() and (path.stat().st_size or not least):  # SQLite deletes the WAL of an empty file
                self._connection, self._commits = connect(path, model, least, read_only)
                if read_only and not self.rows(_ANY_TABLE):  # what made the file was killed before its first commit
                    self.close()
            elif least:
                raise lost(path, 0, least)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"{path} cannot be opened: {reason_of(error)}") from error

    def commit(self, statements: Statements) -> None:
        """Executes all statements in one transaction, and returns when their rows are on the disk.

        Raises:
            StorageError: nothing was written.
        """
        try:
            if self._connection is None:
                self._connection, self._commits = connect(self._path, self._model)
            if not statements:
                return
            number = self._commits + 1
            with transaction(self._connection) as connection:
                for statement, rows in (*statements, (_COUNTED, [(str(number),)])):
                    connection.executemany(statement, rows)
        except (*ERRORS, OSError) as error:
            raise unwritable(error) from error
        self._commits = number
        self._count.write(number)

    def count(self, adapter: str) -> tuple[int, int]:
        """How many trajectories of an adapter there are, and how many changes of its policy."""
        ((trajectories,),) = self.rows(_COUNT_TRAJECTORIES, adapter) or [(0,)]
        ((changes,),) = self.rows("SELECT count(*) FROM changes WHERE adapter = ?", adapter) or [(0,)]
        return trajectories, changes

    def forget(self, adapter: str) -> None:
        """Removes all that the journal has of an adapter. Its bytes are overwritten. Raises StorageError."""
        if self._connection is None:
            return
        self.commit([(statement, [(adapter,)]) for statement in _FORGET])
        self.clean()

    def clean(self) -> None:
        """Overwrites what was removed, also in the WAL. Raises StorageError."""
        if self._connection is None:
            return
        try:
            ((busy, _, _),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise StorageError(f"the journal of the run was not cleaned: {reason_of(error)}; do it again") from error
        if busy:
            raise StorageError("the journal of the run was not cleaned: another program reads it; do it again later")

    def move_into_place(self) -> None:
        """Copies the rows in the WAL into the main file, so that less depends on the WAL. If a reader is in the way or
        the disk fails, they stay in the WAL."""
        if self._connection is not None:
            with suppress(sqlite3.Error):  # the commits are on the disk either way
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def remove(self, statements: Statements) -> None:
        """Executes statements that remove rows, and gives their pages back to the disk. Many pages would take long:
        they stay, as do all of a file that an older version has made. New rows use them, and the next start gives
        most of them back.

        Raises:
            StorageError: nothing was removed.
        """
        self.commit(statements)
        ((free,),) = self.rows("PRAGMA freelist_count")
        if self._connection is not None and free <= _FEW_PAGES:
            with suppress(sqlite3.Error):  # a failure costs only room on the disk
                self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` would give back one page

    def close(self) -> None:
        self._count.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- reading ---------------------------------------------------------------------------------
    # These raise ConfigError if the file is damaged.

    def waiting(self, adapter: str) -> tuple[Arrival | GroupEntry, ...]:
        """The trajectories for an adapter that were neither trained on nor dropped, and what came for their groups, in
        order. Trajectories that came in together are one entry."""
        entries: dict[str, list[Trajectory] | GroupEntry] = {}
        for kind, arrival, body in self.rows(_WAITING, adapter):
            if kind != TRAJECTORY:
                entries[str(len(entries))] = self._read(partial(body_from_json, kind), body)
            elif isinstance(together := entries.setdefault(arrival, []), list):
                together.append(self._read(trajectory_from_json, body))
        return tuple(Arrival(tuple(entry)) if isinstance(entry, list) else entry for entry in entries.values())

    def trajectories(self, ids: Sequence[str]) -> dict[str, Trajectory]:
        """Trajectories by id, whatever became of them. Ids that the journal does not have are left out."""
        found: dict[str, Trajectory] = {}
        for start in range(0, len(ids), _IDS_AT_A_TIME):
            some = ids[start : start + _IDS_AT_A_TIME]
            marks = ", ".join("?" * len(some))
            query = f"SELECT body FROM intake WHERE kind = '{TRAJECTORY}' AND trajectory_id IN ({marks})"
            for (body,) in self.rows(query, *some):
                trajectory = self._read(trajectory_from_json, body)
                found[trajectory.trajectory_id] = trajectory
        return found

    def fate(self, trajectory_id: str) -> Fate | None:
        """What became of a trajectory; None: the journal does not have it."""
        query = (
            "SELECT i.adapter, i.body, e.state, e.reason FROM intake i LEFT JOIN ends e USING (trajectory_id) "
            f"WHERE i.kind = '{TRAJECTORY}' AND i.trajectory_id = ?"
        )
        for adapter, body, state, reason in self.rows(query, trajectory_id):
            return Fate(adapter, self._read(trajectory_from_json, body), state or "", reason or "")
        return None

    def newest_groups(self, prefix: str, count: int) -> tuple[str, ...]:
        """The last `count` ids of groups that begin with `prefix`, newest first."""
        query = (
            f"SELECT group_id FROM intake WHERE kind = '{TRAJECTORY}' AND substr(group_id, 1, ?) = ? "
            "GROUP BY group_id ORDER BY max(number) DESC LIMIT ?"
        )
        return tuple(group_id for (group_id,) in self.rows(query, len(prefix), prefix, count))

    def groups(self, prefix: str, but: str, most: int) -> tuple[tuple[Trajectory, ...], ...]:
        """The newest `most` groups whose ids begin with `prefix`, of all adapters, whatever became of them, but for
        those that were dropped for the reason `but`; oldest first."""
        groups: dict[str, list[Trajectory]] = {}
        for group_id, body in self.rows(_GROUPS, prefix, f"{prefix}\U0010ffff", but, most):
            groups.setdefault(group_id, []).append(self._read(trajectory_from_json, body))
        return tuple(map(tuple, groups.values()))

    def changes(self, adapter: str) -> tuple[PolicyChange, ...]:
        """All changes of an adapter that are here, in order."""
        return tuple(map(self._change, self.rows(f"{_CHANGES} WHERE adapter = ? ORDER BY number", adapter)))

    def rollbacks(self, adapter: str) -> tuple[PolicyChange, ...]:
        """The rollbacks and rebuilds of an adapter that are here, in order."""
        query = f"{_CHANGES} WHERE adapter = ? AND kind = 'rollback' ORDER BY number"
        return tuple(map(self._change, self.rows(query, adapter)))

    def changes_since(self, adapter: str, number: int) -> tuple[PolicyChange, ...]:
        """What a start from the change of this number needs, in order: the changes after it or, if the policy was
        replaced since then, from the last time on; and up to 1,000 before these."""
        ((replaced,),) = self.rows(_LAST_REPLACED, adapter) or [(0,)]
        after = max(number, replaced) - LINEAGE_CHANGES
        rows = self.rows(f"{_CHANGES} WHERE adapter = ? AND number > ? ORDER BY number", adapter, after)
        return tuple(map(self._change, rows))

    def progress(self, adapter: str) -> dict[str, float]:
        """The progress of all updates of an adapter, each value from the last one that names it. The newest update has
        all of it, unless a version wrote it that kept only what each update named."""
        progress: dict[str, float] = {}
        if self._connection is not None:
            try:
                for (body,) in self._connection.execute(_UPDATES, (adapter,)):
                    update = self._read(progress_from_json, body)
                    progress = {**update.progress, **progress}
                    if update.all_progress:
                        break
            except ERRORS as error:
                raise damaged(self._path, reason_of(error)) from error
        return progress

    def trained(self) -> tuple[str, ...]:
        """The adapters that were in training last, besides the default one."""
        rows = self.rows("SELECT value FROM about WHERE name = 'trained'")
        return self._read(names_from_json, rows[0][0]) if rows else ()

    def settings(self) -> dict[str, LearningSettings]:
        """The settings of updates, by digest."""
        rows = self.rows("SELECT name, value FROM about WHERE name GLOB ?", f"{SETTINGS}*")
        return {name.removeprefix(SETTINGS): self._read(settings_from_json, text) for name, text in rows}

    def base_model(self) -> str:
        """The fingerprint of the base model; empty if there is no file yet."""
        return str(dict(self.rows("SELECT name, value FROM about WHERE name = 'model'")).get("model", ""))

    def newest_version(self, adapter: str) -> int:
        """The number of the newest version of an adapter that an update has published; 0 if there is none."""
        ((version, _),) = self.rows(_NEWEST_VERSION, adapter) or [(0, 0)]
        return self._read(_version, version)

    def newest_version_change(self, adapter: str) -> int:
        """The number of the change that has published that version; 0 if there is none."""
        ((_, number),) = self.rows(_NEWEST_VERSION, adapter) or [(0, 0)]
        return int(number)

    def has_all_progress(self, adapter: str) -> bool:
        """Whether the newest update of an adapter has all of its progress; see `progress`."""
        ((body,),) = self.rows(f"{_UPDATES} LIMIT 1", adapter) or [("{}",)]
        return self._read(progress_from_json, body).all_progress

    def newest_changes(self, count: int) -> tuple[PolicyChange, ...]:
        """The changes of all adapters that were written last, newest first."""
        return tuple(map(self._change, self.rows(f"{_CHANGES} ORDER BY rowid DESC LIMIT ?", count)))

    def _change(self, row: tuple[Any, ...]) -> PolicyChange:
        adapter, number, at, kind, text = row
        return PolicyChange(adapter, number, at, self._read(partial(body_from_json, kind), text))

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows that a query gives; none if there is no file yet."""
        if self._connection is None:
            return []
        try:
            return self._connection.execute(query, values).fetchall()
        except ERRORS as error:
            raise damaged(self._path, reason_of(error)) from error

    def _read(self, parse: Callable[[Any], T], stored: Any) -> T:
        try:
            return parse(stored)
        except MALFORMED as error:
            raise damaged(self._path, str(error).partition("\n")[0]) from error
