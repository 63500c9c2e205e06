"""The folder of a run, which holds all that is worth keeping of it. It is locked as long as the run lasts.

    checkpoints/                          ROOT; a run without --checkpoint-dir makes its own folder here
        20261122-055816-1f3a/             named by local date, time, and four random digits
            run.lock                      the ids of the run and of its process, which locks it (flock)
            run.json                      see `rl.runs.record`
            journal.sqlite                see `rl.runs.store`
            run.commits                   how many commits the journal has at least
            metrics.jsonl                 see `extras.trackers`
            default/checkpoint-10/ ...    see `checkpoints`
            tone/versions.json            which versions were loaded from folders, and which of them was live
            tone/version-3/               a copy of one of them

A folder given with --checkpoint-dir is itself the folder of one run. If there is something to resume in it, that
run is resumed. `adapter_in` finds the checkpoint that a path into such a folder means.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from mlx_parallm import atomic
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import (
    AdapterFileError,
    ConfigError,
    ConflictError,
    StorageError,
)

ROOT = Path("checkpoints")
"""Relative to the current folder."""
FOLDERS = (ROOT, Path("runs"))
"""Where runs are looked for. People give theirs names below the second one."""
LATEST, TAGS, MANIFEST = "latest", "tags.json", "manifest.json"
LOCK, RECORD, METRICS = "run.lock", "run.json", "metrics.jsonl"
JOURNAL, COMMITS = "journal.sqlite", "run.commits"
_MOMENT_S = 0.05
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")
TAGS_TYPE = TypeAdapter(dict[str, str])
VERSIONS_FILE = "versions.json"
_COPY = re.compile(r"version-(0|[1-9][0-9]{0,8})")
_log = logging.getLogger(__name__)

_CONTENTS = 100
"""Of how many contents an adapter's numbers are kept, the newest ones."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, locked by this process until `close`. If the process dies, the system unlocks it.

    `id`: identifies the run, and stays the same when the run is resumed. `resumed`: the folder held checkpoints or a
    journal when it was opened. `own`: this process made the folder, below ROOT.
    """

    path: Path
    id: str
    resumed: bool
    own: bool
    descriptor: int

    def close(self) -> None:
        """Unlocks the folder. Removes it first if `own` is set and there is nothing in it to keep."""
        if self.own and not can_resume(self.path):
            with suppress(OSError):
                kept = (LOCK, RECORD, METRICS)
                for folder in [entry for entry in self.path.iterdir() if entry.name not in kept]:
                    folder.rmdir()  # fails for other files, and for folders that are not empty
                for file in (RECORD, METRICS):
                    (self.path / file).unlink(missing_ok=True)
                (self.path / LOCK).unlink()
                for folder in (self.path, self.path.parent):
                    folder.rmdir()
        os.close(self.descriptor)


def open_run(named: Path | None, resume: bool, wanted: bool) -> Run | None:
    """Opens and locks a run's folder: `named` if it is given, else that of the newest run if `resume` is set, else a
    new one if `wanted` is set.

    Returns:
        None if no folder is named and neither `resume` nor `wanted` is set.

    Raises:
        ConfigError: there is nothing to resume, another process uses the folder, it cannot be written, or it is not the
            folder of one run.
    """
    if named is not None:
        if (runs := list(runs_in(named))) and not is_run(named) and not can_resume(named):
            raise ConfigError(
                f"--checkpoint-dir: {named} holds {len(runs)} runs, each in a folder of its own; name one of them, "
                f"such as {runs[-1]}, or give --resume alone for the newest below {ROOT}"
            )
        if resume and not can_resume(named):
            raise ConfigError(
                f"--resume: {named} holds no checkpoint and no journal; leave --resume out to begin there"
            )
        return _locked(named, own=False)
    if resume:
        runs = [run for run in runs_in(ROOT) if can_resume(run)]
        if not runs:
            raise ConfigError(
                f"--resume: no run below {ROOT} holds a checkpoint or a journal; leave it out, or name a run"
            )
        return _locked(runs[-1], own=False)
    if not wanted:
        return None
    return _locked(new_run(), own=True)


def new_run() -> Path:
    """A folder for a run that has none, which does not exist yet. Its name begins with the date and time in UTC, which
    neither summer time nor a journey sets back."""
    return ROOT / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def is_run(folder: Path) -> bool:
    """Whether a run has used this folder."""
    return (folder / LOCK).is_file()


def runs_in(root: Path) -> Iterator[Path]:
    """The folders of runs in `root`, oldest first: names sort by date."""
    if root.is_dir():
        yield from sorted(folder for folder in root.iterdir() if is_run(folder))


def can_resume(folder: Path) -> bool:
    """Whether a run has left a checkpoint here, a journal, or the count of one that is gone."""
    kept = (folder / JOURNAL, folder / COMMITS)
    return any(folder.glob(f"*/checkpoint-*/{MANIFEST}")) or any(path.is_file() for path in kept)


def named_run(text: str) -> Path:
    """The folder of a run that a person has named: by a path, or by its name below one of FOLDERS."""
    path = Path(text).expanduser()
    return next((found for found in (path, *(folder / text for folder in FOLDERS)) if found.exists()), path)


def process_of(folder: Path) -> int | None:
    """The id of the process that uses this folder now; None if none does."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _stored(descriptor)[1] or 0
    finally:
        os.close(descriptor)
    return None


def _locked(path: Path, own: bool) -> Run:
    try:
        atomic.make_folder(path)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"checkpoints cannot be kept in {path} ({error.strerror}): give --checkpoint-dir a folder that this user "
            "can write"
        ) from error
    try:
        _lock(descriptor)
        return Run(path, _signed(descriptor), can_resume(path), own, descriptor)
    except BlockingIOError as error:
        process = _stored(descriptor)[1]
        os.close(descriptor)
        raise ConfigError(
            f"--checkpoint-dir: another process{f' ({process})' if process else ''} uses {path}; stop it, or give this "
            "one a folder of its own"
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{path / LOCK} cannot be used: {error.strerror}; give another --checkpoint-dir") from error


def _lock(descriptor: int) -> None:
    """Raises BlockingIOError: another process has the lock, and not only for the moment that `process_of` takes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_MOMENT_S)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _signed(descriptor: int) -> str:
    """Writes this process's id into the lock file, and returns the run's, which is made if there is none yet."""
    run = _stored(descriptor)[0] or secrets.token_hex(4)
    text = f"{run}\n{os.getpid()}\n".encode()
    os.pwrite(descriptor, text, 0)  # over the same id, which a full disk or a kill cannot take away so
    os.ftruncate(descriptor, len(text))
    os.fsync(descriptor)
    return run


def _stored(descriptor: int) -> tuple[str, int | None]:
    """The run's id in the lock file, and that of the process which wrote it; "" and None where there is none."""
    run, _, process = os.pread(descriptor, 64, 0).decode(errors="replace").strip().partition("\n")
    return (
        run if len(run) == 8 and run.isalnum() else "",
        int(process) if process.isascii() and process.isdecimal() else None,
    )


# -- checkpoints by path --------------------------------------------------------------------------


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name, None if `name` is not `checkpoint-<step>`."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def stored_latest(path: Path) -> str:
    """The name in the file `latest`, empty if the file is missing or incomplete."""
    try:
        name, newline, rest = path.read_bytes().decode().partition("\n")
    except (ValueError, OSError):
        return ""
    return name if newline and not rest else ""


def adapter_in(path: Path) -> Path:
    """The folder of the checkpoint that a path means; the path itself if it means none.

    Raises:
        AdapterFileError: it is a run with several adapters.
    """
    with suppress(OSError):  # what cannot be looked at is for the reader of the files to report
        if path.is_dir():
            return _latest_of(path) or _only_adapter_of(path) or path
        if path.name == LATEST:
            return _latest_of(path.parent) or path
        return _tagged(path) or path
    return path


def named_adapter(text: str) -> Path:
    """The folder of the adapter that a person has named: by a path, or by one below one of FOLDERS; see `adapter_in`.
    Raises AdapterFileError as that does."""
    path = Path(text).expanduser()
    found = map(adapter_in, (path, *(folder / text for folder in FOLDERS)))
    return next((folder for folder in found if folder.exists()), path)


def _latest_of(adapter: Path) -> Path | None:
    """The checkpoint that `latest` names or, if that one is gone, the one with the highest step."""
    found = {entry.name: entry for entry in adapter.glob("checkpoint-*") if (entry / MANIFEST).is_file()}
    steps = {name: step for name in found if (step := step_of(name)) is not None}
    name = stored_latest(adapter / LATEST)
    return found[name if name in steps else max(steps, key=lambda name: steps[name])] if steps else None


def _only_adapter_of(run: Path) -> Path | None:
    if not is_run(run):
        return None
    adapters = {entry.name: latest for entry in sorted(run.iterdir()) if (latest := _latest_of(entry))}
    if len(adapters) > 1:
        raise AdapterFileError(
            f"{run.name} is a run with several adapters, {', '.join(adapters)}: name one of these folders", "lora_path"
        )
    return next(iter(adapters.values()), None)


def _tagged(path: Path) -> Path | None:
    tags = path.with_name(TAGS)
    if not tags.is_file():
        return None
    try:
        name = TAGS_TYPE.validate_json(tags.read_bytes(), strict=True).get(path.name, "")
    except ValueError:
        return None
    return path.with_name(name) if step_of(name) is not None else None


# -- versions from folders ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedVersions:
    """The versions of one adapter that were loaded from folders.

    `numbers`: of contents, by `AdapterFile.digest`. `last`: the largest number. `live`: the numbers of the version that
    was live last, and before it of the one that a rollback would have made live. `found`: the number of the version
    that a restart would have found then, in a checkpoint or in the adapter folder; if it finds that one, `live` holds.
    `saved`: the name of the adapter's newest checkpoint then, if there was one.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    numbers: Mapping[str, int] = field(default_factory=dict)
    last: int = 0
    live: tuple[int, ...] = ()
    found: int | None = None
    saved: str = ""


_LOADED = TypeAdapter(LoadedVersions)


class KeptVersions:
    """Reads and writes the files. Any thread may use it; methods that write block on the disk.

    Args:
        folder: of the run; None: there is none, and nothing is kept.

    Raises:
        ConfigError: a file cannot be read.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.RLock()  # held from reading what is kept until that is replaced
        files = folder.glob(f"*/{VERSIONS_FILE}") if folder else ()
        self._adapters = {path.parent.name: _read_versions(path) for path in files}

    def __bool__(self) -> bool:
        return self._folder is not None

    def __iter__(self) -> Iterator[tuple[str, LoadedVersions]]:
        return iter(sorted(self._adapters.items()))

    def of(self, adapter: str) -> LoadedVersions:
        return self._adapters.get(adapter, LoadedVersions())

    def number_of(self, adapter: str, digest: str) -> int | None:
        """The number that this content has as a version of the adapter; None if it has none yet."""
        return self.of(adapter).numbers.get(digest)

    def copy_of(self, ref: AdapterRef) -> Path | None:
        """The folder for a copy of a version; None if nothing is kept."""
        return self._folder / ref.name / f"version-{ref.version}" if self._folder else None

    def holds(self, folder: Path) -> bool:
        """Whether a folder is one of the run's."""
        return self._folder is not None and folder.is_relative_to(self._folder)

    def number(self, ref: AdapterRef, digest: str) -> None:
        """Keeps the number of a content. Call this before a request can use the version.

        Raises:
            ConflictError: the adapter's name differs from another one's only in upper and lower case.
            StorageError: the disk failed.
        """
        with self._lock:
            old = self.of(ref.name)
            if self and old.numbers.get(digest) != ref.version:
                numbers = [(other, number) for other, number in old.numbers.items() if other != digest]
                newest = dict([*numbers, (digest, ref.version)][-_CONTENTS:])
                self._write(ref.name, replace(old, numbers=newest, last=max(old.last, ref.version)))

    def set_live(
        self, adapter: str, live: Sequence[int], found: int | None, saved: str, known: Collection[int]
    ) -> None:
        """Keeps which versions are live and were live before, and removes the copies of versions that are not `known`.
        `found`, `saved`: see `LoadedVersions`. Raises as `number`."""
        with self._lock:
            old, new = self.of(adapter), tuple(live)
            if self and (old.live, old.found) != (new, found):
                self._write(adapter, replace(old, live=new, found=found, saved=saved))
                self._prune(adapter, known)

    def remove(self, refs: Collection[AdapterRef]) -> None:
        """Removes the copies of versions. Raises OSError."""
        with self._lock:
            for path in map(self.copy_of, refs):
                if path is not None and path.is_dir():
                    atomic.remove(atomic.hide(path))

    def forget(self, adapter: str) -> None:
        """Forgets an adapter, whose folder is being removed."""
        with self._lock:
            self._adapters = {name: versions for name, versions in self._adapters.items() if name != adapter}

    def _write(self, adapter: str, versions: LoadedVersions) -> None:
        assert self._folder is not None
        for other in self._adapters:
            if other != adapter and other.casefold() == adapter.casefold():
                raise ConflictError(f"{adapter} and {other} would share a folder on some disks: use another name")
        path = self._folder / adapter / VERSIONS_FILE
        try:
            atomic.make_folder(path.parent)
            atomic.replace_file(path, _LOADED.dump_json(versions, indent=2) + b"\n")
        except OSError as error:
            reason = atomic.reason_of(error)
            raise StorageError(f"the versions of {adapter} cannot be kept for a restart: {reason}") from error
        self._adapters = {**self._adapters, adapter: versions}

    def _prune(self, adapter: str, known: Collection[int]) -> None:
        assert self._folder is not None
        try:
            for path in (self._folder / adapter).iterdir():
                match = _COPY.fullmatch(path.name)
                if match and int(match[1]) not in known:
                    atomic.remove(atomic.hide(path))
        except OSError as error:
            _log.warning("a copy of a version of %s could not be removed: %s", adapter, error.strerror)


def _read_versions(path: Path) -> LoadedVersions:
    try:
        return _LOADED.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): restore it from a backup, or remove it, and the "
            "numbers of versions begin again"
        ) from error
