"""PrefixStore keeps cached blocks in a folder, so that a server that starts again need not compute them again.

Each block, and each recurrent state, is a file of its own, written whole or not at all. Several servers may use one
folder: equal blocks have equal names, and a file that another server has removed is a miss.

A block's name says everything that its keys and values depend on: the model, the adapter version and the salt, and all
tokens up to the block's last one. It is a chain of SHA-256 digests, one for each block.

A file holds the block's 64 ids and the bytes of its keys and values, as safetensors, and then the SHA-256 of these. So
a reader notices a file that is damaged, or that has another block's name. The recurrent state at the end of a block, if
there is a checkpoint of it, is in a file of its own, of the same form: a block may get its checkpoint after it was
written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from mlx_parallm import __version__, atomic
from mlx_parallm.errors import StorageError
from mlx_parallm.kv.arena import Bytes
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.layer_state import KVLayout

_log = logging.getLogger(__name__)

_SUFFIX = ".kv"
_INTERRUPTED_S = 60.0
"""Age in seconds at which a temporary file counts as left behind by a server that was killed."""
_RETRY_S = 60.0
"""Time without writing after a file could not be written."""
_FORMAT = 1
_DIGEST_BYTES = 32


class BlockFileError(Exception):
    """A file is damaged, or holds another block than its name says."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block of a chain, or the recurrent state at its end. `key` is the name of its file, and `depth` the number of
    blocks from the root to it, itself included. `ids`: its 64 tokens."""

    key: bytes
    depth: int
    ids: tuple[int, ...]
    is_state: bool = False

    @property
    def of_state(self) -> BlockName:
        """The recurrent state at the end of this block."""
        return BlockName(_digest(self.key + b"state"), self.depth, self.ids, is_state=True)


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block in host memory. `arrays`: the keys and then the values of each layer, in the model's order; of a state,
    the arrays of each recurrent layer."""

    name: BlockName
    arrays: list[Bytes]


# -- names ---------------------------------------------------------------------------------------


def model_key(fingerprint: str, layout: KVLayout) -> bytes:
    """Identifies a model, the version of the code that computes it, the shapes, dtype and bits of its keys and values,
    and the arrays of its states."""
    layers = [[s.kv_heads, s.head_dim_k, s.head_dim_v, s.window] for s in layout.attention.values()]
    states = [[s.shapes, list(map(str, s.dtypes))] for s in layout.recurrent.values()]
    code = [_FORMAT, __version__, metadata.version("mlx-lm")]
    return _digest(json.dumps([*code, BLOCK_TOKENS, fingerprint, _kind(layout), layers, *states]).encode())


def root_key(model: bytes, root: str) -> bytes:
    """Where the chains of one adapter version and salt begin, which `root` describes."""
    return _digest(model + root.encode())


def block_key(before: bytes, ids: Sequence[int]) -> bytes:
    """The key of the block of `ids` that follows the block or the root whose key is `before`."""
    return _digest(before + np.asarray(ids, "<u4").tobytes())


def block_names(root: bytes, ids: Sequence[int]) -> Iterator[BlockName]:
    """The names of the full blocks of `ids`, in order, as far as at least one id is left after a block.

    `root`: the `root_key` that their chain begins with.
    """
    key = root
    for depth, start in enumerate(range(0, len(ids) - BLOCK_TOKENS, BLOCK_TOKENS), start=1):
        block = tuple(ids[start : start + BLOCK_TOKENS])
        key = block_key(key, block)
        yield BlockName(key, depth, block)


# -- contents ------------------------------------------------------------------------------------


def shapes(layout: KVLayout) -> dict[str, tuple[int, ...]]:
    """The arrays of a block's file and their shapes, in the order of `HostBlock.arrays`."""
    named: dict[str, tuple[int, ...]] = {}
    stored = layout.stored
    for index, spec in enumerate(stored.attention.values()):
        for name, width in (("keys", spec.head_dim_k), ("values", spec.head_dim_v)):
            named[f"layers.{index}.{name}"] = (spec.kv_heads, BLOCK_TOKENS, width * stored.dtype.size)
    return named


def state_shapes(layout: KVLayout) -> dict[str, tuple[int, ...]]:
    """The arrays of a state's file and their shapes, likewise. Each has the bytes of an array of a recurrent layer."""
    return {
        f"layers.{index}.{part}": (math.prod(shape) * dtype.size,)
        for index, spec in enumerate(layout.recurrent.values())
        for part, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    }


def encode(block: HostBlock, names: Mapping[str, tuple[int, ...]]) -> bytes:
    """The content of the file of a block or a state, whose arrays have these names."""
    data = save({"ids": np.asarray(block.name.ids, np.uint32), **dict(zip(names, block.arrays, strict=True))})
    return data + _digest(data)


def decode(data: bytes, ids: Sequence[int], names: Mapping[str, tuple[int, ...]]) -> list[Bytes]:
    """The arrays of a file, in the order of `names`.

    Raises:
        BlockFileError: the file is damaged, or does not hold what these ids and shapes say.
    """
    content = data[:-_DIGEST_BYTES]
    if _digest(content) != data[-_DIGEST_BYTES:]:
        raise BlockFileError("the checksum is wrong")
    try:
        tensors = load(content)
    except Exception as error:  # there is more than one, such as for an unknown dtype
        raise BlockFileError(f"this is no safetensors file: {error}") from error
    if not np.array_equal(tensors.pop("ids", np.empty(0)), np.asarray(ids)):
        raise BlockFileError("the block is of other tokens")
    if {name: array.shape for name, array in tensors.items() if array.dtype == np.uint8} != dict(names):
        raise BlockFileError("its arrays have other shapes")
    return [tensors[name] for name in names]


def _kind(layout: KVLayout) -> str:
    return str(layout.dtype) if layout.bits is None else f"{layout.dtype} in {layout.bits} bits"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class PrefixStore:
    """The files of one folder. `write` and `read` return at once; their work is done on `worker`.

    Attributes:
        model: identifies the model, and the shapes and dtypes of what it keeps for a row.
        written: blocks and states written.
        damaged: files that did not hold the block that their name says. They are removed.

    Args:
        folder: made if it is not there, for this user only.
        limit_bytes: bytes of all files. Those that were used least recently are removed beyond that.
        worker: an executor with one thread.
        wake: called on that thread when a `write` or a `read` has ended.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        layout: KVLayout,
        limit_bytes: int,
        worker: Executor,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model_key(fingerprint, layout)
        self.written = self.damaged = 0
        self._folder = folder
        self._shapes = {False: shapes(layout), True: state_shapes(layout)}  # by `BlockName.is_state`
        self._limit_bytes = limit_bytes
        self._worker = worker
        self._wake = wake
        self._writing: Future[None] | None = None
        self._failed_at: float | None = None  # monotonic; None: the last file was written
        atomic.make_folder(folder.absolute().parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._files: set[bytes] = set()
        self._trim()

    def __contains__(self, key: bytes) -> bool:
        """Whether there was a file of this name when the folder was last looked at. Does not use the disk."""
        return key in self._files

    @property
    def writes(self) -> bool:
        """False for `_RETRY_S` after a file could not be written, because the disk is full for example."""
        return self._failed_at is None or time.monotonic() >= self._failed_at + _RETRY_S

    @property
    def may_write(self) -> bool:
        """Whether `write` may be called: the last one has ended, and files can be written."""
        return self.writes and (self._writing is None or self._writing.done())

    def write(self, blocks: Sequence[HostBlock]) -> None:
        """Writes blocks, and removes other files if the folder is over its limit. A failure is logged."""
        self._writing = self._worker.submit(self._write, blocks)
        self._writing.add_done_callback(lambda _: self._wake())

    def read(self, names: Sequence[BlockName]) -> Future[list[HostBlock]]:
        """Reads consecutive blocks of a chain, up to the first that has no usable file."""
        reading = self._worker.submit(self._read, names)
        reading.add_done_callback(lambda _: self._wake())
        return reading

    def clear(self) -> Future[None]:
        """Removes all files. The future raises StorageError if one cannot be removed."""
        return self._worker.submit(self._clear)

    # -- on the worker's thread ------------------------------------------------------------------

    def _write(self, blocks: Sequence[HostBlock]) -> None:
        try:
            for block in blocks:
                if block.name.key not in self._files:
                    data = encode(block, self._shapes[block.name.is_state])
                    atomic.replace_file(self._path(block.name.key), data, mode=0o600)
                    self._mark_used(block.name)
                    self.written += 1
            self._trim()
            self._failed_at = None
        except OSError as error:
            if self._failed_at is None:
                _log.warning("cached prefixes cannot be written to %s now: %s", self._folder, error.strerror)
            self._failed_at = time.monotonic()

    def _read(self, names: Sequence[BlockName]) -> list[HostBlock]:
        blocks = []
        try:
            for name in names:
                data = self._path(name.key).read_bytes()
                blocks.append(HostBlock(name, decode(data, name.ids, self._shapes[name.is_state])))
                with suppress(OSError):  # the disk is read-only
                    self._mark_used(name)
        except OSError:  # another server has removed it
            self._files.discard(name.key)
        except BlockFileError as error:
            self._files.discard(name.key)
            self._remove_damaged(name.key, error)
        return blocks

    def _clear(self) -> None:
        try:
            for _, _, path in self._entries():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cached prefixes in memory are forgotten, but a file of them cannot be removed ({error.strerror}); "
                "remove the folder of --prefix-cache-dir"
            ) from error
        self._files = set()

    def _mark_used(self, name: BlockName) -> None:
        """Sets the time of a file. Each block counts as a second older than the one before it, so that a chain is
        removed from its end."""
        used_at = time.time() - name.depth
        os.utime(self._path(name.key), (used_at, used_at))

    def _remove_damaged(self, key: bytes, error: BlockFileError) -> None:
        self.damaged += 1
        _log.warning("%s is removed: %s", self._path(key), error)
        with suppress(OSError):  # it is not read again in any case
            self._path(key).unlink(missing_ok=True)

    def _trim(self) -> None:
        """Looks at the folder anew. Removes the files used least recently beyond the limit, and temporary files that
        servers which were killed have left."""
        atomic.sweep(self._folder, older_than_s=_INTERRUPTED_S)
        found = sorted(self._entries(), reverse=True)
        total = 0
        kept = set()
        for _, size, path in found:
            total += size
            if total > self._limit_bytes:
                path.unlink(missing_ok=True)
            else:
                kept.add(bytes.fromhex(path.stem))
        self._files = kept

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """When each file was last used, its size and its path. A time that is still to come, of a clock that was ahead,
        says nothing, so such a file counts as never used."""
        latest = time.time() + _INTERRUPTED_S
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                key, status = bytes.fromhex(path.stem), path.stat()
            except (ValueError, FileNotFoundError):
                continue  # not a file of a prefix store, or removed by another server
            if len(key) == len(self.model):
                yield (status.st_mtime if status.st_mtime <= latest else 0.0), status.st_size, path

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"
