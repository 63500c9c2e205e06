"""AdapterArchives: the archives of shared adapter versions in the head's folder, each one file that is there whole or
not at all.

    adapters/NAME/VERSION.tar
"""

from __future__ import annotations

from pathlib import Path

from mlx_parallm import atomic
from mlx_parallm.cluster.archive import check, digest
from mlx_parallm.core import AdapterRef, SharedVersion
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownModelError


class AdapterArchives:
    """Blocks on the disk, so call it in a worker thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        atomic.make_folder(folder)

    def put(self, ref: AdapterRef, archive: bytes, sha256: str, fence: int) -> SharedVersion:
        """Keeps an archive. Doing so again changes nothing.

        Raises:
            InvalidRequestError: it has another checksum, or is not an adapter's.
            ConflictError: there is another archive of this version.
        """
        found = digest(archive)
        if found != sha256.lower():
            raise InvalidRequestError(f"X-Sha256: the body has the SHA-256 {found}; send it again.", param="X-Sha256")
        check(archive)
        file = self._file(ref)
        if not file.exists():
            atomic.make_folder(file.parent)
            atomic.replace_file(file, archive)
        elif digest(file.read_bytes()) != found:
            raise ConflictError(f"{ref} has another content already; publish a new version", param="version")
        return SharedVersion(ref.name, ref.version, found, len(archive), fence)

    def path(self, ref: AdapterRef) -> Path:
        """The file of a version. Raises UnknownModelError: there is none."""
        file = self._file(ref)
        if not file.exists():
            raise UnknownModelError(f"The head has no adapter version {ref}.")
        return file

    def remove(self, ref: AdapterRef) -> None:
        """Removes the file of a version that nobody needs any more."""
        self._file(ref).unlink(missing_ok=True)

    def _file(self, ref: AdapterRef) -> Path:
        return self._folder / ref.name / f"{ref.version}.tar"
