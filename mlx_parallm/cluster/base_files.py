"""The base model's files, which the head gives to nodes that lack them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mlx_parallm.adapters.checkpoints.manifest import file_sum
from mlx_parallm.core import BaseFile
from mlx_parallm.errors import InvalidRequestError


class BaseFiles:
    """The files in the folder of a base model. Their checksums are computed once, when somebody first wants them.

    Args:
        folder: None for the bundled model, which every node has.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._listing: asyncio.Task[tuple[BaseFile, ...]] | None = None

    async def listed(self) -> tuple[BaseFile, ...]:
        """All files, with their checksums."""
        if self._listing is None or (self._listing.done() and self._listing.exception()):
            self._listing = asyncio.create_task(asyncio.to_thread(self._list))
        return await asyncio.shield(self._listing)

    def path(self, name: str) -> Path:
        """The path of a file. Raises InvalidRequestError: the base model has no such file."""
        for file in self._files():
            if file.name == name:
                return file
        raise InvalidRequestError("The base model has no file of that name; see POST /v1/cluster/join.", param="file")

    def _files(self) -> list[Path]:
        entries = self._folder.iterdir() if self._folder is not None else ()
        return sorted(entry for entry in entries if entry.is_file() and not entry.name.startswith("."))

    def _list(self) -> tuple[BaseFile, ...]:
        sums = ((file.name, file_sum(file)) for file in self._files())
        return tuple(BaseFile(name, found.bytes, found.sha256) for name, found in sums)
