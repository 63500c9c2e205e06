"""Adapters as files: by name in the adapter folder, by path under the allowed roots, as checkpoints. No MLX."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_parallm.adapters.checkpoints import CheckpointManager
from mlx_parallm.adapters.files import AdapterFile, read_adapter
from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.adapters.names import AdapterRoots, check_name
from mlx_parallm.adapters.versions import Version, VersionInfo
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import AdapterRef, CheckpointCard
from mlx_parallm.errors import AdapterFileError, InvalidRequestError

_log = logging.getLogger(__name__)


class AdapterLibrary:
    """Reads and checks. Any thread may use it; it blocks on the disk: not for the event loop or the device thread.

    Args:
        folder: its subfolders are adapters, served by their folder names; None: there is none.
        roots: folders that adapters may be read from by path, beside `folder`.
        checkpoints: None without a checkpoint folder.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        max_rank: int,
        folder: Path | None = None,
        roots: Sequence[Path] = (),
        checkpoints: CheckpointManager | None = None,
    ) -> None:
        self.layout = layout
        self.max_rank = max_rank
        self.checkpoints = checkpoints
        self._folder = folder
        self._roots = AdapterRoots([*([folder] if folder else []), *roots])

    def read(self, path: str) -> AdapterFile:
        """The adapter at a path that a client gave.

        Raises:
            InvalidRequestError: the path is not inside an allowed root.
            AdapterFileError: its files cannot be used.
        """
        return read_adapter(self._roots.resolve(path), self.layout, self.max_rank, self._roots)

    def read_again(self, version: Version) -> AdapterWeights:
        """A version's weights as they were when it was added.

        Raises:
            AdapterFileError, UnknownModelError: they are gone, damaged or changed.
        """
        if version.info.checkpoint and self.checkpoints:
            return self.checkpoints.load_checkpoint(version.ref.name, version.info.checkpoint).weights
        file = read_adapter(Path(version.info.root), self.layout, self.max_rank, self._roots)
        if file.digest != version.info.digest:
            raise AdapterFileError(f"the files of {version.ref} have changed: load them again as a new version")
        return file.weights

    def discover(self) -> Iterator[tuple[str, AdapterFile]]:
        """The adapters in the folder, by name; one that cannot be used is skipped with a warning."""
        for path in sorted(self._folder.iterdir()) if self._folder else ():
            if not (path / "adapter_config.json").is_file():
                continue
            try:
                yield check_name(path.name), self.read(path.name)
            except InvalidRequestError as error:
                _log.warning("adapter %s is skipped: %s", path.name, error)

    def find_checkpoint(self, adapter: str, which: str) -> tuple[AdapterRef, VersionInfo] | None:
        """The version that a checkpoint holds; from memory."""
        card = self.checkpoints.find(adapter, which) if self.checkpoints else None
        return (card.adapter, info_of_checkpoint(card)) if card else None

    def first_version(self, adapter: str) -> int:
        """A number that no checkpoint of that adapter has used."""
        return 1 + (self.checkpoints.newest_version(adapter) if self.checkpoints else 0)


def info_of_file(file: AdapterFile) -> VersionInfo:
    weights = file.weights
    return VersionInfo(weights.rank, weights.alpha, weights.targets, file.nbytes, file.digest, str(file.path))


def info_of_checkpoint(card: CheckpointCard, digest: str = "") -> VersionInfo:
    """`digest`: `AdapterFile`'s, where the files have been read."""
    return VersionInfo(card.rank, card.alpha, card.targets, card.bytes, digest, card.path, card.name)
