"""LoadedFolders: which names the adapters of folders have, and whether a folder must be read again."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.adapters.files.read import AdapterFile
from mlx_parallm.adapters.library import FolderStamp
from mlx_parallm.adapters.registry import AdapterRegistry


class LoadedFolders:
    """The folders that requests have named, with their stamps when they were read, and the names of their adapters."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._folders: dict[Path, tuple[FolderStamp, str]] = {}

    def remember(self, folder: Path, stamp: FolderStamp, name: str) -> None:
        """The adapter of this folder, which had this stamp before it was read, is live under this name."""
        self._folders[folder] = (stamp, name)

    def unchanged(self, folder: Path, stamp: FolderStamp) -> str | None:
        """The name that a folder was remembered with, if it has this stamp still and the name is live."""
        known, name = self._folders.get(folder, (None, ""))
        live = self._registry.live(name)
        return name if known == stamp and live is not None and live.info.root == str(folder) else None

    def live_with(self, file: AdapterFile) -> str | None:
        """The name of the adapter whose live version came from this folder, with this content."""
        return self.live_from(file.path, file.digest)

    def live_from(self, folder: Path, digest: str | None = None) -> str | None:
        """The name of the adapter whose live version came from this folder. `digest`: with this content; None: any."""
        live = (self._registry.live(name) for name in {version.ref.name for version in self._registry.versions()})
        found = (v for v in live if v and v.info.root == str(folder) and digest in (None, v.info.digest))
        return next((version.ref.name for version in found), None)
