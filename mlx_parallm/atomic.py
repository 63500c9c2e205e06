"""Files and folders that appear whole or not at all: written under a temporary name, fsynced, then renamed.

An interrupted process leaves hidden entries with one of two prefixes, which `sweep` removes.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ASIDE = ".tmp-"
_TRASH = ".trash-"

_log = logging.getLogger(__name__)


_ADVICE = {
    errno.ENOSPC: "make room on the disk and try again",
    errno.EDQUOT: "make room on the disk and try again",
    errno.EROFS: "the disk is mounted read-only: its system may have found a fault of it",
    errno.EIO: "the disk has a fault: see the system's log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EACCES: "let this user write there",
}


def reason_of(error: OSError) -> str:
    """Why a file could not be written and what to do about it, without its path."""
    reason = error.strerror or type(error).__name__
    return f"{reason}; {_ADVICE[error.errno]}" if error.errno in _ADVICE else reason


def sync(path: Path) -> None:
    """Returns once a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a file and fsyncs it. A crash may leave it incomplete. `mode`: the permissions of a new file, before the
    umask."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replaces a file's content. Every reader, after a crash too, finds the whole old content or the whole new one.
    `mode`: as in `write_file`."""
    aside = _unused(path.parent, _ASIDE)
    try:
        write_file(aside, data, mode)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def append_lines(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Appends whole lines, which end with a newline: all of them or, if the disk fails, none. If a crash has cut off
    the last line of the file, a newline ends it first. It is not fsynced. `mode`: as in `write_file`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


@contextmanager
def folder_aside(parent: Path) -> Iterator[Path]:
    """A new hidden folder to fill and rename. When the block ends, it is removed if it was not renamed."""
    aside = _unused(parent, _ASIDE)
    try:
        aside.mkdir()
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A hidden folder to fill with files. When the block ends, it is fsynced and renamed to `path`; if the block
    raises, it is removed."""
    parent = path.absolute().parent
    make_folder(parent)
    with folder_aside(parent) as aside:
        yield aside
        for entry in (*aside.iterdir(), aside):
            sync(entry)
        os.rename(aside, path)
    sync(parent)


def make_folder(path: Path) -> None:
    """Makes `path` and its parents, and returns when their entries are on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def hide(folder: Path) -> Path:
    """Renames `folder` to a hidden name in one step. Returns the hidden path, for `remove`."""
    trash = _unused(folder.parent, _TRASH)
    os.rename(folder, trash)
    return trash


def remove(trash: Path) -> None:
    """Removes a hidden folder. If that fails, a later `sweep` removes it."""
    try:
        sync(trash.parent)  # otherwise a crash could bring the folder back under its name, half empty
        shutil.rmtree(trash)
    except OSError as error:
        _log.warning("%s could not be removed: %s", trash, error.strerror)


def sweep(parent: Path, older_than_s: float = -math.inf) -> None:
    """Removes what interrupted writes left in `parent`. Nothing else may be writing there.

    With `older_than_s`, others may: entries that were changed in the last `older_than_s` seconds stay.
    """
    for entry in list(parent.iterdir()):
        if entry.name.startswith((_ASIDE, _TRASH)) and _age_s(entry) >= older_than_s:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _age_s(entry: Path) -> float:
    """Seconds since an entry was last changed. Infinite if it is gone."""
    try:
        return time.time() - entry.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


def _unused(parent: Path, prefix: str) -> Path:
    return parent / f"{prefix}{secrets.token_hex(8)}"
