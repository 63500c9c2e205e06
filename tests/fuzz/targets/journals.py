"""The file of a run's journal: a start reads all that it needs of it, or says in one error that it is damaged."""

import json
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path

from fuzz.mutation import bytes_mutated, json_with

from mlx_parallm.core.requests import Signal
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.runs.lineage import lineage
from mlx_parallm.rl.runs.records import Rollback, Update
from mlx_parallm.rl.runs.replay import StartPoint, plan
from mlx_parallm.rl.runs.store import JournalFile

BODIES = {"intake": "body", "changes": "body", "about": "value"}
NAMES = [*Update.__slots__, *Rollback.__slots__, "trajectory_id", "prompt_ids", "completion_ids", "collection", "score"]
WORDS = ("published", "trained", "math@3", "checkpoint-1", "a-0", *Signal, [1, 2], [0.5])
of_bodies = json_with(NAMES, WORDS)


def mutated(data, rng):
    """Mostly with another body of a row, which the file's own checks do not see."""
    if rng.randrange(3):
        with suppress(sqlite3.Error, UnicodeError, OverflowError), closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(data)
            table = rng.choice(list(BODIES))
            name, key = BODIES[table], "name" if table == "about" else "rowid"
            rows = database.execute(f"SELECT {key}, {name} FROM {table}").fetchall()
            if rows:
                row, body = rng.choice(rows)
                before = body if isinstance(body, bytes) else str(body).encode(errors="replace")
                body = of_bodies(before, rng)[:4096]
                text = body.decode() if body.isascii() and rng.randrange(8) else body
                database.execute(f"UPDATE {table} SET {name} = ? WHERE {key} = ?", (text, row))
                database.commit()
                return database.serialize()
    return bytes_mutated(data, rng)


def run(data):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal.sqlite"
        path.write_bytes(data)
        with suppress(ConfigError):
            opened = JournalFile(path)
            try:
                read(opened)
            finally:
                opened.close()


def read(file):
    """What a start, and those who ask later, read."""
    for adapter in ("math", *file.trained()):
        file.waiting(adapter)
        file.progress(adapter)
        assert file.newest_version(adapter) >= 0
        file.has_all_progress(adapter)
        changes = file.changes(adapter)
        for start in (StartPoint(), StartPoint("math@3", "checkpoint-1", 1)):
            plan(file.changes_since(adapter, start.number or 0), start)
        for version in (None, "math@4"):
            lineage(changes, version)
    file.settings()
    json.dumps(file.base_model()).encode()
    file.newest_changes(5)
    file.groups("", "forgotten", 10)
    file.trajectories(["g-0", "g-1"])
    file.fate("g-0")
