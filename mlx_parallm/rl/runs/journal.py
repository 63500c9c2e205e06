"""Journal: what of a run must survive a crash, written by one thread, with one commit for all that waits.

accept, feedback, changed ─▶ waiting ─▶ one transaction, fsync ─▶ all their callers go on
scored, ended ─────────────▶    │
                                └─ while it runs, the next ones gather
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConfigError, StorageError
from mlx_parallm.rl.runs.compaction import compaction, removal_of_unrewarded
from mlx_parallm.rl.runs.records import (
    Fate,
    GroupEntry,
    PolicyChange,
    Update,
    body_to_json,
    trajectory_to_json,
)
from mlx_parallm.rl.runs.store import SETTINGS, TRAJECTORY, JournalFile, Statements, unwritable
from mlx_parallm.tasks import spawn

T = TypeVar("T")

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
"""After so long without a commit, the rows are moved out of the WAL."""

_UNREWARDED_KEPT = 100
"""So many dropped answers without a reward are kept for each change that is kept."""

_FORGET = ("DELETE FROM intake WHERE trajectory_id = ?", "DELETE FROM ends WHERE trajectory_id = ?")
_IN = "INSERT INTO intake (adapter, group_id, trajectory_id, kind, arrival, body) VALUES (?, ?, ?, ?, ?, ?)"
_END = "INSERT OR IGNORE INTO ends (trajectory_id, state, reason, at) VALUES (?, ?, ?, ?)"
_TRAINED = "INSERT OR REPLACE INTO about (name, value) VALUES ('trained', ?)"
_SETTINGS = "INSERT OR IGNORE INTO about (name, value) VALUES (?, ?)"
_CHANGE = "INSERT OR REPLACE INTO changes (adapter, number, at, kind, body) VALUES (?, ?, ?, ?, ?)"


@dataclass(eq=False, slots=True)
class _Entry:
    """Rows to be written. `done` is completed when they are on the disk.

    `kept`: what they say has happened in memory already, so if they cannot be written now they are written later. All
    other rows are given up with an error.
    """

    statements: Callable[[], Statements]
    kept: bool
    done: asyncio.Future[None]


class Journal:
    """The journal of one run. Event loop's thread only; nothing blocks it.

    Args:
        file: None: nothing is written, and every call returns at once.
        keep: changes of an adapter that stay whole even if a checkpoint covers them; see `compaction`.
    """

    def __init__(self, file: JournalFile | None = None, keep: int = 1000) -> None:
        self._file = file
        self._keep = keep
        self._compacting: asyncio.Task[None] | None = None
        self._compacted: dict[str, int] = {}  # the last change that a compaction of this process was asked to remove
        self._dropped = 0  # trajectories, since the last removal of those that nobody has rewarded
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._waiting: list[_Entry] = []
        self._unwritten: list[_Entry] = []  # kept ones, in order, that the disk has refused
        self._committing: asyncio.Task[None] | None = None
        self._failure: StorageError | None = None  # of the last commit
        self._closed = False
        self._idle: asyncio.TimerHandle | None = None

    # -- what is acknowledged after it is on the disk --------------------------------------------
    # These raise StorageError if it cannot be written.

    async def accept(
        self, adapter: str, trajectories: Sequence[Trajectory], entries: Sequence[GroupEntry] = ()
    ) -> None:
        """Trajectories of one group that came in together, which train `adapter`, and what came with them. One that has
        the id of an earlier one takes its place."""
        await self._write(partial(_accepted, adapter, tuple(trajectories), tuple(entries)))

    async def entered(self, adapter: str, group_id: str, entry: GroupEntry) -> None:
        """What a client has sent for a group."""
        await self._write(partial(_entered, adapter, group_id, entry))

    async def changed(self, change: PolicyChange, dropped: Mapping[str, str] = MappingProxyType({})) -> None:
        """A change of a policy, which has been made. The trajectories of an update end with it, in the same commit, so
        that none of them can be learnt from again. `dropped`: the reasons why some of them were not trained on, by id.

        Raises:
            StorageError: it is not on the disk yet. It will be written before anything else.
        """
        await self._write(partial(changed, change, dropped), kept=True)

    def started(self, change: PolicyChange) -> None:
        """Where training has started; or an earlier change, whose version a start has made live. It is written before
        a later change is."""
        self._submit(partial(changed, change), kept=True)

    def configured(self, digest: str, settings: str) -> None:
        """Keeps the settings that later updates name by this digest. They are written before a later change is."""
        self._submit(lambda: [(_SETTINGS, [(f"{SETTINGS}{digest}", settings)])], kept=True)

    def trains(self, adapters: Sequence[str]) -> None:
        """Keeps which adapters are in training, besides the default one."""
        self._submit(lambda: [(_TRAINED, [(json.dumps(adapters),)])], kept=True)

    async def rewrite(self, statements: Statements) -> None:
        """Changes what the file has, when a compaction that is under way has ended.

        Raises:
            StorageError: nothing was changed, nor will be.
        """
        if self._compacting is not None:
            await self._compacting
        await self._write(lambda: statements)

    def check(self) -> None:
        """Raises StorageError if the last entries could not be written."""
        if self._failure is not None:
            raise self._failure

    async def flush(self) -> None:
        """Returns when everything is on the disk.

        Raises:
            StorageError: some changes, rewards or ends cannot be written now.
        """
        if self._unwritten or self._waiting or self._committing is not None:
            await self._write(lambda: [])

    # -- what nobody waits for -------------------------------------------------------------------

    def noted(self, adapter: str, group_id: str, entry: GroupEntry) -> None:
        """What has happened to a group without a client."""
        self._submit(partial(_entered, adapter, group_id, entry), kept=True)

    def added(self, adapter: str, trajectories: Sequence[Trajectory], entries: Sequence[GroupEntry]) -> None:
        """Trajectories that were made of others; see `accept`."""
        self._submit(partial(_accepted, adapter, tuple(trajectories), tuple(entries)), kept=True)

    def dropped(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Trajectories that will not be trained on. Now and then, old ones that nobody has rewarded are removed."""
        rows = [(one, "dropped", reason, time.time()) for one in trajectory_ids]
        self._submit(lambda: [(_END, rows)], kept=True)
        self._dropped += len(rows)
        if self._file is not None and self._compacting is None and self._dropped > _UNREWARDED_KEPT * self._keep // 10:
            self._dropped = 0
            self._remove(removal_of_unrewarded(self._file, _UNREWARDED_KEPT * self._keep))

    async def forget(self, adapter: str) -> None:
        """See `JournalFile.forget`."""
        await self.flush()
        await self.read(lambda file: file.forget(adapter))

    def compact(self, adapter: str, covered: int, needed: Collection[str]) -> None:
        """Removes what no start can need any more, a little at a time; see `compaction`. Nothing happens while another
        compaction is under way, or if there is little to remove. Call this after a checkpoint was saved."""
        is_worthwhile = covered - self._compacted.get(adapter, 0) > self._keep // 10
        if self._file is not None and self._compacting is None and is_worthwhile:
            self._compacted[adapter] = covered
            self._remove(compaction(self._file, adapter, covered, self._keep, frozenset(needed)))

    def _remove(self, steps: Iterator[None]) -> None:
        self._compacting = spawn(self._compact(steps), _log, "removing old entries from the journal")

    async def _compact(self, steps: Iterator[None]) -> None:
        """Commits of clients come between two steps."""
        try:
            more = True
            while more and not self._closed:
                more = bool(await self.read(lambda _: next(steps, False) is None))
        except (StorageError, ConfigError) as error:
            _log.warning("%s; old entries will be removed later", error)
        finally:
            self._compacting = None

    # -- reading, before anything is written -----------------------------------------------------
    # These raise ConfigError if the file is damaged.

    async def read(self, read: Callable[[JournalFile], T]) -> T | None:
        """What `read` finds in the file; None if nothing is written."""
        if self._file is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._worker, read, self._file)

    async def groups(self, prefix: str, but: str, most: int) -> Sequence[Sequence[Trajectory]]:
        """See `JournalFile.groups`. What was said before this call is taken into account, if it can be written."""
        with suppress(StorageError):
            await self.flush()
        return await self.read(lambda file: file.groups(prefix, but, most)) or ()

    async def fate(self, trajectory_id: str) -> Fate | None:
        """See `JournalFile.fate`. What was said before this call is taken into account, if it can be written."""
        with suppress(StorageError):
            await self.flush()
        return await self.read(lambda file: file.fate(trajectory_id))

    async def close(self) -> None:
        """Writes what waits, and closes the file. What cannot be written is logged. A second call does nothing."""
        if self._closed:
            return
        try:
            await self.flush()
        except StorageError as error:
            _log.error("%d entries of the journal are lost: %s", len(self._unwritten), error)
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        if self._file is not None:
            await asyncio.get_running_loop().run_in_executor(self._worker, self._file.close)
        self._worker.shutdown()

    # -- commits ---------------------------------------------------------------------------------

    async def _write(self, statements: Callable[[], Statements], kept: bool = False) -> None:
        if (done := self._submit(statements, kept)) is not None:
            await asyncio.shield(done)

    def _submit(self, statements: Callable[[], Statements], kept: bool) -> asyncio.Future[None] | None:
        if self._file is None:
            return None
        done = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieve)
        if self._closed:
            done.set_exception(StorageError("the run has ended, and nothing more is kept"))
            return done
        self._waiting.append(_Entry(statements, kept, done))
        if self._committing is None:
            self._committing = spawn(self._commit_all(self._file), _log, "writing the journal")
        return done

    async def _commit_all(self, file: JournalFile) -> None:
        """Commits until nothing waits: everything that has come during one commit is in the next one."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                entries, self._waiting = self._waiting, []
                batch = [*self._unwritten, *entries]
                try:
                    error, unusable = await loop.run_in_executor(self._worker, _commit, file, batch)
                except Exception as failure:  # noqa: BLE001 - whoever waits for these entries must be told
                    error, unusable = unwritable(failure), {}
                self._unwritten = [e for e in batch if e.kept and e not in unusable] if error is not None else []
                self._tell(error)
                for entry in entries:
                    _complete(entry.done, unusable.get(entry, error))
        finally:
            self._committing = None
            if self._idle is not None:
                self._idle.cancel()
            self._idle = loop.call_later(_IDLE_S, self._move_into_place, file)

    def _move_into_place(self, file: JournalFile) -> None:
        if self._committing is None and not self._closed:
            self._worker.submit(file.move_into_place)

    def _tell(self, error: StorageError | None) -> None:
        """Logs the first failure of several."""
        if error is not None and self._failure is None:
            _log.error("%s; it is tried again with the next entry", error)
        self._failure = error


def _commit(file: JournalFile, entries: Sequence[_Entry]) -> tuple[StorageError | None, Mapping[_Entry, StorageError]]:
    """Writes the rows of all entries at once. In the worker thread.

    Returns:
        Why nothing was written, or None; and the entries that can never be written, such as one whose metadata is no
        JSON. Those do not stop the others.
    """
    statements: list[tuple[str, Sequence[tuple[object, ...]]]] = []
    unusable: dict[_Entry, StorageError] = {}
    for entry in entries:
        try:
            statements += entry.statements()
        except Exception as error:  # noqa: BLE001 - it must cost its own entry only
            _log.exception("an entry of the journal cannot be written")
            unusable[entry] = StorageError(f"the journal cannot keep this: {error}")
    try:
        file.commit(statements)
    except StorageError as error:
        return error, unusable
    return None, unusable


def _complete(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _retrieve(done: asyncio.Future[None]) -> None:
    """Marks an error as seen: nobody may be waiting for it, and it is logged."""
    if not done.cancelled():
        done.exception()


def _accepted(adapter: str, trajectories: Sequence[Trajectory], entries: Sequence[GroupEntry]) -> Statements:
    arrival = uuid.uuid4().hex
    rows = [
        (adapter, each.group_id, each.trajectory_id, TRAJECTORY, arrival, trajectory_to_json(each))
        for each in trajectories
    ]
    ids = [(each.trajectory_id,) for each in trajectories]
    entered = [statement for entry in entries for statement in _entered(adapter, trajectories[0].group_id, entry)]
    return [*((statement, ids) for statement in _FORGET), (_IN, rows), *entered]


def _entered(adapter: str, group_id: str, entry: GroupEntry) -> Statements:
    kind, text = body_to_json(entry)
    trajectory_id = getattr(entry, "trajectory_id", None)
    return [(_IN, [(adapter, group_id, trajectory_id, kind, None, text)])]


def changed(change: PolicyChange, dropped: Mapping[str, str] = MappingProxyType({})) -> Statements:
    """Writes a change. The trajectories of an update end with it. `dropped`: see `Journal.changed`."""
    kind, text = body_to_json(change.body)
    row = (change.adapter, change.number, change.at, kind, text)
    ids = change.body.trajectory_ids if isinstance(change.body, Update) else ()
    ends = [(one, "dropped", reason, change.at) for one, reason in dropped.items()]
    ends += [(one, "trained", "", change.at) for one in ids if one not in dropped]
    return [(_CHANGE, [row]), (_END, ends)]
