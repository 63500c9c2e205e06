"""Archives of adapters, as nodes send them to each other: an uncompressed tar with the two files of an adapter in
PEFT's or mlx-lm's format. The same files give the same bytes."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from mlx_parallm import atomic
from mlx_parallm.adapters.formats import CONFIG_FILE, MLX_LM_WEIGHTS, PEFT_WEIGHTS
from mlx_parallm.errors import MALFORMED, AdapterFileError

_FILES = frozenset({CONFIG_FILE, PEFT_WEIGHTS, MLX_LM_WEIGHTS})


def digest(data: bytes) -> str:
    """The checksum of an archive: its SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def pack(folder: Path) -> bytes:
    """The archive of the adapter in a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(_FILES):
            if (file := folder / name).is_file():
                content = file.read_bytes()
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Writes the files of an archive into `folder`, which appears whole or not at all.

    Raises:
        AdapterFileError: it is not such an archive.
    """
    contents = _contents(data)
    with atomic.new_folder(folder) as aside:
        for name, content in contents.items():
            atomic.write_file(aside / name, content)


def check(data: bytes) -> None:
    """Raises AdapterFileError: it is not the archive of an adapter."""
    _contents(data)


def _contents(data: bytes) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for entry in archive:
                file = archive.extractfile(entry) if _is_plain(entry) and entry.name in _FILES else None
                if file is None:
                    raise AdapterFileError(f"the archive has an entry that is no adapter's file: {entry.name[:80]!a}")
                contents[entry.name] = file.read()
    except (*MALFORMED, tarfile.TarError, EOFError, OSError) as error:
        raise AdapterFileError(f"the archive is not a tar file: {error}") from error
    if CONFIG_FILE not in contents or len(contents) != 2:
        raise AdapterFileError(f"the archive must have two files: {CONFIG_FILE} and the weights")
    return contents


def _is_plain(entry: tarfile.TarInfo) -> bool:
    """Whether an entry is a file with all its bytes in the archive. The rest of a sparse one is zeros that the reader
    makes, so a small archive could be very large in memory."""
    return entry.type == tarfile.REGTYPE and not entry.issparse()
