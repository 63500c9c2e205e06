"""The folder in which a run of the server keeps its checkpoints. It is locked as long as the run lasts.

    checkpoints/                          ROOT; a run without --checkpoint-dir makes its own folder here
        20261122-055816-1f3a/             named by local date, time, and four random digits
            run.lock                      holds the run's id; locked (flock) by the process that uses the folder
            default/checkpoint-10/ ...    see `store`

A folder given with --checkpoint-dir is itself the folder of one run. If it holds checkpoints, that run is resumed.
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
from mlx_parallm.adapters.checkpoints.manifest import MANIFEST
from mlx_parallm.errors import ConfigError

ROOT = Path("checkpoints")
"""Relative to the current folder."""
LOCK = "run.lock"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, locked by this process until `close`. If the process dies, the system unlocks it.

    `id`: identifies the run, and stays the same when the run is resumed. `resumed`: the folder held checkpoints when it
    was opened. `own`: this process made the folder, below ROOT.
    """

    path: Path
    id: str
    resumed: bool
    own: bool
    descriptor: int

    def close(self) -> None:
        """Unlocks the folder. Removes it first if `own` is set and it holds no checkpoint."""
        if self.own and not _has_checkpoints(self.path):
            with suppress(OSError):
                (self.path / LOCK).unlink()
                for folder in (*self.path.iterdir(), self.path, self.path.parent):
                    folder.rmdir()  # removes empty folders only
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
        if resume and not _has_checkpoints(named):
            raise ConfigError(f"--resume: {named} holds no checkpoint; leave --resume out to begin there")
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
    runs = [run for run in _runs(root) if _has_checkpoints(run)]
    if not runs:
        raise ConfigError(f"--resume: no run below {root} holds a checkpoint; leave it out, or name --checkpoint-dir")
    return runs[-1]


def _refuse_root(folder: Path) -> None:
    if (runs := list(_runs(folder))) and not is_run(folder) and not _has_checkpoints(folder):
        raise ConfigError(
            f"--checkpoint-dir: {folder} holds {len(runs)} runs, each in a folder of its own; name one of them, such "
            f"as {runs[-1]}, or give --resume alone for the newest below {ROOT}"
        )


def _runs(root: Path) -> Iterator[Path]:
    """The folders of runs in `root`, oldest first: names sort by date."""
    if root.is_dir():
        yield from sorted(folder for folder in root.iterdir() if is_run(folder))


def _has_checkpoints(folder: Path) -> bool:
    return any(folder.glob(f"*/checkpoint-*/{MANIFEST}"))


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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Run(path, _id(descriptor), _has_checkpoints(path), own, descriptor)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{path / LOCK} cannot be used: {error.strerror}; give another --checkpoint-dir"
            ) from error
        raise ConfigError(
            f"--checkpoint-dir: another process uses {path}; stop it, or give this one a folder of its own"
        ) from error


def _id(descriptor: int) -> str:
    """The id in the lock file. If there is none yet, writes a new one there."""
    stored = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
    if len(stored) == 8 and stored.isalnum():
        return stored
    made = secrets.token_hex(4)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{made}\n".encode(), 0)
    os.fsync(descriptor)
    return made
