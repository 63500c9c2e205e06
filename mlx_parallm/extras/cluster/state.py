"""The folder of a node's state, and the token that all nodes of a cluster have."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_parallm import atomic
from mlx_parallm.errors import ConfigError

TOKEN = "token"
_LOCK = "lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """The folder, which no other process uses until the block ends. It is made if it is not there.

    Raises:
        ConfigError: another process uses it, or it cannot be written.
    """
    try:
        atomic.make_folder(folder)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cluster.state_dir: {folder} cannot be written: {error.strerror}; name another with --cluster-dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    except BlockingIOError as error:
        raise ConfigError(
            f"cluster.state_dir: another process uses {folder}; stop it, or give this one a --cluster-dir of its own"
        ) from error
    finally:
        os.close(descriptor)


def own_token(folder: Path) -> str:
    """The token in the head's folder, which only its owner can read. It is made at the first call."""
    file = folder / TOKEN
    if not file.exists():
        atomic.replace_file(file, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)
    return file.read_text().strip()
