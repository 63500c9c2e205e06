"""Opens an adapter's files, and reads its config. Only regular files inside the allowed roots are opened."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from mlx_parallm.adapters.names import AdapterRoots, shown
from mlx_parallm.errors import AdapterFileError

CONFIG_FILE = "adapter_config.json"
_CONFIG_BYTES = 2**20
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npz")
# O_NONBLOCK: a pipe must not hold the thread. O_NOFOLLOW: the path is real already.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def problem(message: str) -> AdapterFileError:
    """The error of every file that cannot be used."""
    return AdapterFileError(message, "lora_path")


def open_file(path: Path, roots: AdapterRoots | None) -> BinaryIO:
    """Opens a regular file; without `roots` it may lie anywhere.

    Raises:
        AdapterFileError: it leads out of the roots, is not a regular file, or cannot be read.
    """
    if roots is not None and not roots.inside(path):
        raise problem(f"{path.name} leads out of the allowed adapter roots: copy the file into the adapter's directory")
    try:
        descriptor = os.open(os.path.realpath(path), _FLAGS)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise problem(f"{path.name} cannot be read: {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise problem(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def open_weights(folder: Path, name: str, roots: AdapterRoots | None) -> BinaryIO:
    """Opens the weights file `name`.

    Raises:
        AdapterFileError: as `open_file`, or there are weights in another format only.
    """
    if not os.path.lexists(folder / name):
        raise problem(_missing(folder, name))
    return open_file(folder / name, roots)


def _missing(folder: Path, name: str) -> str:
    pickles = sorted(entry for entry in _entries(folder) if entry.endswith(_PICKLES))
    if pickles:
        return f"{shown(pickles[0])} is not read, it may run code: convert it to safetensors ({name})"
    return f"there is no {name} beside {CONFIG_FILE}: the weights must be in safetensors, in one file of that name"


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # only the message is poorer
        return []


def read_config(folder: Path, roots: AdapterRoots | None) -> dict[str, Any]:
    """The adapter's config.

    Raises:
        AdapterFileError: there is none, or it is not a JSON object of sane size.
    """
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        raise problem(f"there is no {CONFIG_FILE}: is it the directory of an mlx-lm or PEFT adapter?")
    with open_file(path, roots) as file:
        data = read_bytes(file, _CONFIG_BYTES + 1, CONFIG_FILE)
    if len(data) > _CONFIG_BYTES:
        raise problem(f"{CONFIG_FILE} is larger than {_CONFIG_BYTES} bytes: it is no adapter's config")
    return parse_object(data, CONFIG_FILE)


def read_bytes(file: BinaryIO, size: int, what: str) -> bytes:
    """At most `size` bytes, fewer at the end of the file."""
    try:
        return file.read(size)
    except OSError as error:
        raise problem(f"{what} cannot be read: {error.strerror}") from error


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object in UTF-8, no key in it twice.

    Raises:
        AdapterFileError: it is anything else.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise problem(f"{what} is not well-formed JSON: {error}") from error
    if not isinstance(value, dict):
        raise problem(f"{what} must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    if len(merged) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(key)} is there twice")
    return merged
