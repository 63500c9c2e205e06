"""Safetensors in two steps: the header, which is checked before anything large is read, then the tensors.

The layout is https://github.com/huggingface/safetensors#format: the header's length in 8 bytes, the header, the data.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from mlx_parallm.adapters.files.disk import parse_object, problem, read_bytes
from mlx_parallm.adapters.names import shown

Float32 = NDArray[np.float32]

_HEADER_BYTES = 2**23
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_DAMAGED = "is truncated or damaged: copy or export it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of the file, `raw`, and the tensors that they declare."""

    raw: bytes
    tensors: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Of all tensors, as stored."""
        return sum(info.nbytes for info in self.tensors.values())


def read_header(file: BinaryIO, what: str) -> Header:
    """Raises AdapterFileError: it is no safetensors file, or a tensor is not of a float type that is supported."""
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
    if dtype not in _ITEM_BYTES:
        raise problem(f"{shown(name)} has dtype {shown(dtype)}: store it as F32, F16 or BF16")
    return TensorInfo(dtype, tuple(shape))


def read_tensors(file: BinaryIO, header: Header, what: str) -> tuple[bytes, dict[str, Float32]]:
    """The rest of a file whose header was just read: all its bytes, and the tensors widened to float32.

    Raises:
        AdapterFileError: data and header do not agree, or a value is not finite.
    """
    size = len(header.raw) + header.nbytes
    # The file's length first: a header that lies must not make us allocate what it claims.
    data = header.raw + read_bytes(file, header.nbytes, what) if os.fstat(file.fileno()).st_size == size else b""
    if len(data) != size:
        raise problem(f"{what} {_DAMAGED}; its tensors are not as long as its header says")
    try:
        stored = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise problem(f"{what} {_DAMAGED} ({error})") from error
    return data, {name: _widened(name, header.tensors[name], entry["data"]) for name, entry in stored}


def _widened(name: str, info: TensorInfo, data: bytearray) -> Float32:
    if info.dtype == "BF16":  # the upper half of a float32
        array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        array = np.frombuffer(data, "<f4" if info.dtype == "F32" else "<f2").astype(np.float32)
    if not np.isfinite(array).all():
        raise problem(f"{shown(name)} has values that are not finite: the training run diverged, use an earlier save")
    return array.reshape(info.shape)
