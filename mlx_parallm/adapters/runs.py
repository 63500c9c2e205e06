"""The folder of a run, which holds all that is worth keeping of it. It is locked as long as the run lasts.

    checkpoints/                          ROOT; a run without --checkpoint-dir makes its own folder here
        20261122-055816-1f3a/             named by local date, time, and four random digits
            run.lock                      the ids of the run and of its process, which locks it (flock)
            run.json                      see `rl.runs.record`
            journal.sqlite                see `rl.runs.store`
            run.commits                   how many commits the journal has at least
            metrics.jsonl                 see `rl.tracking.trackers`
            default/checkpoint-10/ ...    see `store`

A folder given with --checkpoint-dir is itself the folder of one run. If there is something to resume in it, that
run is resumed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm import atomic
from mlx_parallm.adapters.manifest import MANIFEST
from mlx_parallm.errors import ConfigError

ROOT = Path("checkpoints")
"""Relative to the current folder."""
FOLDERS = (ROOT, Path("runs"))
"""Where runs are looked for. People give theirs names below the second one."""
LOCK, RECORD, METRICS = "run.lock", "run.json", "metrics.jsonl"
JOURNAL, COMMITS = "journal.sqlite", "run.commits"
_MOMENT_S = 0.05


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
        _refuse_root(named)
        if resume and not can_resume(named):
            raise ConfigError(
                f"--resume: {named} holds no checkpoint and no journal; leave --resume out to begin there"
            )
        return _locked(named, own=False)
    if resume:
        return _locked(_newest(ROOT), own=False)
    if not wanted:
        return None
    return _locked(ROOT / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}", own=True)


def is_run(folder: Path) -> bool:
    """Whether a run has used this folder."""
    return (folder / LOCK).is_file()


def _newest(root: Path) -> Path:
    runs = [run for run in runs_in(root) if can_resume(run)]
    if not runs:
        raise ConfigError(f"--resume: no run below {root} holds a checkpoint or a journal; leave it out, or name a run")
    return runs[-1]


def _refuse_root(folder: Path) -> None:
    if (runs := list(runs_in(folder))) and not is_run(folder) and not can_resume(folder):
        raise ConfigError(
            f"--checkpoint-dir: {folder} holds {len(runs)} runs, each in a folder of its own; name one of them, such "
            f"as {runs[-1]}, or give --resume alone for the newest below {ROOT}"
        )


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
    except OSError as error:
        process = _stored(descriptor)[1] if isinstance(error, BlockingIOError) else None
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{path / LOCK} cannot be used: {error.strerror}; give another --checkpoint-dir"
            ) from error
        raise ConfigError(
            f"--checkpoint-dir: another process{f' ({process})' if process else ''} uses {path}; stop it, or give this "
            "one a folder of its own"
        ) from error


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
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{run}\n{os.getpid()}\n".encode(), 0)
    os.fsync(descriptor)
    return run


def _stored(descriptor: int) -> tuple[str, int | None]:
    """The run's id in the lock file, and that of the process which wrote it; "" and None where there is none."""
    run, _, process = os.pread(descriptor, 64, 0).decode(errors="replace").strip().partition("\n")
    return (
        run if len(run) == 8 and run.isalnum() else "",
        int(process) if process.isascii() and process.isdecimal() else None,
    )
