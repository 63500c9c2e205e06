"""Reads adapter files without trusting them: only regular, well-formed files of limited size in the allowed roots.

Safetensors files are read in two steps: first the header, which is checked before anything large is read, then the
tensors. The layout is https://github.com/huggingface/safetensors#format: the header's length in 8 bytes, the header,
the data.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from mlx_parallm.errors import AdapterFileError, InvalidRequestError, shown

Float32 = NDArray[np.float32]

CONFIG_FILE = "adapter_config.json"
_MAX_PATH = 4096
_CONFIG_BYTES, _HEADER_BYTES = 2**20, 2**23
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_RANK = 2**20
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npz")
_DAMAGED = "is truncated or damaged: copy or export it again"
# O_NONBLOCK: opening a pipe must not block the thread. O_NOFOLLOW: the path is resolved already.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def problem(message: str) -> AdapterFileError:
    """The error for a file that cannot be used."""
    return AdapterFileError(message, "lora_path")


class AdapterRoots:
    """The directories under which adapters may be read. Symlinks are resolved before a path is checked.

    Args:
        adapter_in: the directory of the adapter that a path means, such as that of a checkpoint.
    """

    def __init__(self, roots: Sequence[Path], adapter_in: Callable[[Path], Path] = lambda path: path) -> None:
        self._adapter_in = adapter_in
        self._roots = tuple(Path(os.path.realpath(root.expanduser())) for root in roots)

    def resolve(self, path: str) -> Path:
        """The real path of the directory of the adapter that `path` means. A relative `path` is tried against each root
        in turn, then against the working directory.

        Raises:
            InvalidRequestError: there is no root, or no such directory inside one. The message does not reveal
                whether `path` exists outside the roots.
        """
        if not self._roots:
            message = "no directory is allowed: start the server with --allowed-adapter-roots FOLDER, or --adapter-dir"
            raise InvalidRequestError(message, "lora_path")
        for start in (*self._roots, Path.cwd()) if 0 < len(path) <= _MAX_PATH else ():
            named = _real(start / path)
            real = _real(self._adapter_in(named)) if named is not None and self.inside(named) else None
            if real is not None and os.path.isdir(real) and self.inside(real) and self._is_spelled_so(real):
                return real
        raise InvalidRequestError(
            f"{shown(path)} is no directory inside the allowed roots, which are --adapter-dir and "
            "--allowed-adapter-roots: move it into one, or start the server with --allowed-adapter-roots FOLDER (a "
            "relative path is tried in each of them, and in the server's working directory)",
            "lora_path",
        )

    def _is_spelled_so(self, real: Path) -> bool:
        """Whether each part of the path below a root is spelled as in its folder."""
        root = max((root for root in self._roots if real.is_relative_to(root)), key=lambda root: len(root.parts))
        below = [real, *real.parents][: len(real.parts) - len(root.parts)]
        return all(map(is_spelled_so, below))

    def inside(self, path: Path) -> bool:
        """Whether the path, with symlinks resolved, is a root or lies under one."""
        real = _real(path)
        return real is not None and any(real.is_relative_to(root) for root in self._roots)


def is_spelled_so(path: Path) -> bool:
    """Whether the folder of a path has just this name. If not, and there is such a file, then the file system ignores
    case; patterns of names, as API keys have them, do not."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:  # what cannot be listed cannot be compared
        return False


def _real(path: Path) -> Path | None:
    """The path without symlinks; None if no file can have it, because of a NUL or a lone surrogate."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):
        return None


def open_file(path: Path, roots: AdapterRoots | None) -> BinaryIO:
    """Opens a regular file inside the roots, or anywhere if `roots` is None.

    Raises:
        AdapterFileError: the path leads out of the roots, is not a regular file, or cannot be read.
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
        AdapterFileError: see `open_file`; also if the folder only has weights in another format.
    """
    if not os.path.lexists(folder / name):
        raise problem(_missing(folder, name))
    return open_file(folder / name, roots)


def _missing(folder: Path, name: str) -> str:
    pickles = sorted(entry for entry in _entries(folder) if entry.endswith(_PICKLES))
    if pickles:
        return f"{shown(pickles[0])} is not read, because it may run code: convert it to safetensors ({name})"
    return f"there is no {name} beside {CONFIG_FILE}: the weights must be in safetensors, in one file of that name"


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the message has less detail then
        return []


def read_config(folder: Path, roots: AdapterRoots | None) -> dict[str, Any]:
    """Reads the adapter's config.

    Raises:
        AdapterFileError: it is missing, too large, or not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        raise problem(f"there is no {CONFIG_FILE}: is it the directory of an mlx-lm or PEFT adapter?")
    with open_file(path, roots) as file:
        data = read_bytes(file, _CONFIG_BYTES + 1, CONFIG_FILE)
    if len(data) > _CONFIG_BYTES:
        raise problem(f"{CONFIG_FILE} is larger than {_CONFIG_BYTES} bytes: it is no adapter's config")
    return parse_object(data.removeprefix(codecs.BOM_UTF8), CONFIG_FILE)  # editors on Windows write that mark


def read_bytes(file: BinaryIO, size: int, what: str) -> bytes:
    """Reads at most `size` bytes, fewer at the end of the file. `what` names the file in errors."""
    try:
        return file.read(size)
    except OSError as error:
        raise problem(f"{what} cannot be read: {error.strerror}") from error


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object in UTF-8.

    Raises:
        AdapterFileError: it is not a JSON object, or has a key twice.
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


# -- numbers of the config ------------------------------------------------------------------------


def rank_of(value: Any, key: str) -> int:
    """A rank: a whole number from 1 to 2^20. Later checks compare it with the model's shapes and --max-lora-rank.

    `key`: the full name of the config's key, such as `lora_parameters.rank`, for errors.

    Raises:
        AdapterFileError: it is not a rank.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_RANK:
        raise problem(f"{CONFIG_FILE}: {key} must be a whole number from 1 to {_LARGEST_RANK}, got {described(value)}")
    return value


def number_of(value: Any, key: str) -> float:
    """A number that float32 can hold.

    Raises:
        AdapterFileError: it is not a number, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise problem(f"{CONFIG_FILE}: {key} must be a number, got {described(value)}")
    if not abs(value) <= _LARGEST:
        raise problem(f"{CONFIG_FILE}: {key} must be finite in float32, got {described(value)}")
    return float(value)


def flag_of(value: Any, key: str) -> bool:
    """Raises AdapterFileError unless the value is true or false."""
    if not isinstance(value, bool):
        raise problem(f"{CONFIG_FILE}: {key} must be true or false, got {described(value)}")
    return value


def described(value: Any) -> str:
    """A JSON value for an error message, of limited length."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge whole number"
    return "nothing" if value is None else str(value)


# -- safetensors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of one tensor, from the header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its bytes, and the tensors that it declares."""

    raw: bytes
    tensors: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for info in self.tensors.values())


def read_header(file: BinaryIO, what: str) -> Header:
    """Reads the header of a safetensors file. `what` names the file in errors.

    Raises:
        AdapterFileError: it is not a safetensors file, or a tensor has an unsupported type.
    """
    prefix = read_bytes(file, 8, what)
    if len(prefix) < 8:
        raise problem(f"{what} {_DAMAGED}")
    (length,) = struct.unpack("<Q", prefix)
    if length > _HEADER_BYTES:
        raise problem(f"{what} is no safetensors file: its header would be {length} bytes long")
    body = read_bytes(file, length, what)
    if len(body) < length:
        raise problem(f"{what} {_DAMAGED}")
    entries = parse_object(body, f"the header of {what}")
    entries.pop("__metadata__", None)
    return Header(prefix + body, {name: _info(name, entry) for name, entry in entries.items()})


def _info(name: str, entry: Any) -> TensorInfo:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise problem(f"the header's entry of {shown(name)} is malformed: export the file again")
    if dtype not in ITEM_BYTES:
        raise problem(f"{shown(name)} has dtype {shown(dtype)}: store it as F32, F16 or BF16")
    return TensorInfo(dtype, tuple(shape))


def read_tensors(file: BinaryIO, header: Header, names: Collection[str], what: str) -> tuple[bytes, dict[str, Float32]]:
    """Reads the rest of a file, after `read_header`. Returns all bytes of the file, and these tensors as float32.

    Raises:
        AdapterFileError: data and header do not agree, or a value is not finite.
    """
    size = len(header.raw) + header.nbytes
    # Check the file's length first, so that a false header cannot make us allocate what it claims.
    data = header.raw + read_bytes(file, header.nbytes, what) if os.fstat(file.fileno()).st_size == size else b""
    if len(data) != size:
        raise problem(f"{what} {_DAMAGED}; its tensors are not as long as its header says")
    try:
        stored = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise problem(f"{what} {_DAMAGED} ({error})") from error
    wanted = set(names)
    return data, {name: widened(name, header.tensors[name], entry["data"]) for name, entry in stored if name in wanted}


def widened(name: str, info: TensorInfo, data: bytearray) -> Float32:
    if info.dtype == "BF16":  # the upper half of a float32
        array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        array = np.frombuffer(data, "<f4" if info.dtype == "F32" else "<f2").astype(np.float32)
    if not np.isfinite(array).all():
        raise problem(f"{shown(name)} has values that are not finite: the training run diverged, use an earlier save")
    return array.reshape(info.shape)
