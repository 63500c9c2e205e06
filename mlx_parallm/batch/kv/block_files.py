"""The files of cached blocks: how they are named, and what is in them.

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
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load, save

from mlx_parallm.batch.kv.arena import Bytes
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.layer_state import KVLayout

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
    """Identifies a model, the shapes, dtype and bits of its keys and values, and the arrays of its states."""
    layers = [[s.kv_heads, s.head_dim_k, s.head_dim_v, s.window] for s in layout.attention.values()]
    states = [[s.shapes, list(map(str, s.dtypes))] for s in layout.recurrent.values()]
    return _digest(json.dumps([_FORMAT, BLOCK_TOKENS, fingerprint, _kind(layout), layers, *states]).encode())


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
