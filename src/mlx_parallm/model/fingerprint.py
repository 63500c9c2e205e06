"""Which base model an adapter was made for: a digest of the model's files that is quick for large ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlx_parallm.errors import ModelNotFoundError

_MIB = 1 << 20
_WHOLE = 8 * _MIB
_BLOCK = 64 << 10
_BLOCKS = 62


def fingerprint(files: Iterable[Path]) -> str:
    """32 hex digits for the names, sizes and content of `files`, in any order and whatever folder they are in.

    Files over 8 MiB are sampled: the first and the last MiB and 62 blocks of 64 KiB spread evenly between them.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0{_content_digest(path, size)}\n".encode())
    return total.hexdigest()[:32]


def model_files(folder: Path) -> list[Path]:
    """config.json and the weights files that mlx-lm would load, or a GGUF's.

    Raises:
        ModelNotFoundError: there are no weights.
    """
    weights = sorted([*folder.glob("model*.safetensors"), *folder.glob("*.gguf")])
    if not weights:
        raise ModelNotFoundError(f"{folder} holds no model*.safetensors and no .gguf file")
    return [*weights, *folder.glob("config.json")]


def _content_digest(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start, length in _spans(size):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _spans(size: int) -> Iterator[tuple[int, int]]:
    """(start, length) in bytes of what is read of a file."""
    if size <= _WHOLE:
        yield 0, size
        return
    yield 0, _MIB
    room = size - 2 * _MIB - _BLOCK
    for index in range(_BLOCKS):
        yield _MIB + room * index // (_BLOCKS - 1), _BLOCK
    yield size - _MIB, _MIB
