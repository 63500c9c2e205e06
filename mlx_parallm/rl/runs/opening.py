"""Opening the journal of a run: its tables, the checks before anything is written, and the number of its commits."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_parallm import atomic
from mlx_parallm.adapters.runs import COMMITS
from mlx_parallm.errors import ConfigError

SCHEMA = 1
"""Version of the tables, in the file's user_version."""

TRAJECTORY = "trajectory"
"""The kind of the rows of `intake` that are trajectories. Other rows have the kind of their entry."""

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
    except ERRORS as error:
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


def reason_of(error: Exception) -> str:
    """The error's text without a path."""
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
