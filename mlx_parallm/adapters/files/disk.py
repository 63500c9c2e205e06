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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from mlx_parallm.adapters.weights import plain_path
from mlx_parallm.errors import AdapterFileError, InvalidRequestError, shown

Float32 = NDArray[np.float32]

CONFIG_FILE = "adapter_config.json"
_MAX_PATH = 4096
_CONFIG_BYTES, _HEADER_BYTES = 2**20, 2**23
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
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


def _open(path: Path, roots: AdapterRoots | None) -> BinaryIO:
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


def _read(file: BinaryIO, size: int, what: str) -> bytes:
    """Reads at most `size` bytes, fewer at the end of the file. `what` names the file in errors."""
    try:
        return file.read(size)
    except OSError as error:
        raise problem(f"{what} cannot be read: {error.strerror}") from error


def read_config(folder: Path, roots: AdapterRoots | None) -> dict[str, Any]:
    """Reads the adapter's config.

    Raises:
        AdapterFileError: it is missing, too large, or not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        raise problem(f"there is no {CONFIG_FILE}: is it the directory of an mlx-lm or PEFT adapter?")
    with _open(path, roots) as file:
        data = _read(file, _CONFIG_BYTES + 1, CONFIG_FILE)
    if len(data) > _CONFIG_BYTES:
        raise problem(f"{CONFIG_FILE} is larger than {_CONFIG_BYTES} bytes: it is no adapter's config")
    return _parsed(data.removeprefix(codecs.BOM_UTF8), CONFIG_FILE)  # editors on Windows write that mark


def _parsed(data: bytes, what: str) -> dict[str, Any]:
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


# -- safetensors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of one tensor, from the header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class WeightsFile:
    """An open safetensors file, of which the header has been read. Use it as a context manager.

    `tensors`: what the header declares, by name. `data`: all bytes of the file, after `read`.

    Raises:
        AdapterFileError: it is missing, no safetensors file, or a tensor has an unsupported type.
    """

    def __init__(self, folder: Path, name: str, roots: AdapterRoots | None) -> None:
        if not os.path.lexists(folder / name):
            raise problem(_missing(folder, name))
        self._name = name
        self._file = _open(folder / name, roots)
        try:
            self.data = self._header()
            entries = _parsed(self.data[8:], f"the header of {name}")
            entries.pop("__metadata__", None)
            self.tensors = {tensor: _info(tensor, entry) for tensor, entry in entries.items()}
        except AdapterFileError:
            self._file.close()
            raise

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _header(self) -> bytes:
        """The header, with its length before it."""
        prefix = _read(self._file, 8, self._name)
        if len(prefix) < 8:
            raise problem(f"{self._name} {_DAMAGED}")
        (length,) = struct.unpack("<Q", prefix)
        if length > _HEADER_BYTES:
            raise problem(f"{self._name} is no safetensors file: its header would be {length} bytes long")
        body = _read(self._file, length, self._name)
        if len(body) < length:
            raise problem(f"{self._name} {_DAMAGED}")
        return prefix + body

    def read(self, names: Collection[str]) -> dict[str, Float32]:
        """Reads the rest of the file. Returns those of these tensors that it has, as float32.

        Raises:
            AdapterFileError: data and header do not agree, or a value is not finite.
        """
        nbytes = sum(info.nbytes for info in self.tensors.values())
        size = len(self.data) + nbytes
        # Check the file's length first, so that a false header cannot make us allocate what it claims.
        if os.fstat(self._file.fileno()).st_size == size:
            self.data += _read(self._file, nbytes, self._name)
        if len(self.data) != size:
            raise problem(f"{self._name} {_DAMAGED}; its tensors are not as long as its header says")
        try:
            stored = dict(deserialize(self.data))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise problem(f"{self._name} {_DAMAGED} ({error})") from error
        return {name: _widened(name, self.tensors[name], stored[name]["data"]) for name in names if name in stored}


def _missing(folder: Path, name: str) -> str:
    pickles = sorted(entry.name for entry in folder.glob("*") if entry.name.endswith(_PICKLES))
    if pickles:
        return f"{shown(pickles[0])} is not read, because it may run code: convert it to safetensors ({name})"
    return f"there is no {name} beside {CONFIG_FILE}: the weights must be in safetensors, in one file of that name"


def _info(name: str, entry: Any) -> TensorInfo:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise problem(f"the header's entry of {shown(name)} is malformed: export the file again")
    if dtype not in _ITEM_BYTES:
        raise problem(f"{shown(name)} has dtype {shown(dtype)}: store it as F32, F16 or BF16")
    return TensorInfo(dtype, tuple(shape))


def _widened(name: str, info: TensorInfo, data: bytearray) -> Float32:
    if info.dtype == "BF16":  # the upper half of a float32
        array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        array = np.frombuffer(data, "<f4" if info.dtype == "F32" else "<f2").astype(np.float32)
    if not np.isfinite(array).all():
        raise problem(f"{shown(name)} has values that are not finite: the training run diverged, use an earlier save")
    return array.reshape(info.shape)


def stored_tensor(file: Path, plain: str) -> tuple[str, Float32] | None:
    """Type and values of the tensor with this plain path in a file of the base model, None if it has no such floats.

    Raises:
        OSError, ValueError, struct.error: it is gone, or no safetensors file.
    """
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        tensors = json.loads(opened.read(length))
        floats = (name for name, tensor in tensors.items() if tensor.get("dtype") in _ITEM_BYTES)
        name = next((name for name in floats if plain_path(name) == plain), None)
        if name is None:
            return None
        info = TensorInfo(tensors[name]["dtype"], tuple(tensors[name]["shape"]))
        opened.seek(8 + length + tensors[name]["data_offsets"][0])
        return info.dtype, _widened(name, info, bytearray(opened.read(info.nbytes)))
