"""KeptVersions: what a restart must know of the versions that were loaded from folders.

    <run>/<adapter>/versions.json   the number of each content, and which versions were live last
    <run>/<adapter>/version-1/      a copy of a version that was live and that a restart would not find elsewhere

So a version's number is never given to other weights, and what a rollback or a load has made live is live again.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from mlx_parallm import atomic
from mlx_parallm.core import AdapterRef
from mlx_parallm.errors import ConfigError, ConflictError, StorageError

FILE = "versions.json"
_COPY = re.compile(r"version-(0|[1-9][0-9]{0,8})")
_CONTENTS = 100
"""Of how many contents an adapter's numbers are kept, the newest ones."""


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class LoadedVersions:
    """The versions of one adapter that were loaded from folders.

    `numbers`: of contents, by `AdapterFile.digest`. `last`: the largest number. `live`: the numbers of the version that
    was live last, and before it of the one that a rollback would have made live. `found`: the number of the version
    that a restart would have found then, in a checkpoint or in the adapter folder; if it finds that one, `live` holds.
    `at`: when they were live, Unix time in seconds.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    last: int = 0
    live: tuple[int, ...] = ()
    found: int | None = None
    at: float = 0.0


_FILE = TypeAdapter(LoadedVersions)


class KeptVersions:
    """Reads and writes the files. Any thread may use it; methods that write block on the disk.

    Args:
        folder: of the run; None: there is none, and nothing is kept.

    Raises:
        ConfigError: a file cannot be read.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.RLock()  # held from reading what is kept until that is replaced
        self._adapters = {path.parent.name: _read(path) for path in folder.glob(f"*/{FILE}")} if folder else {}

    def __bool__(self) -> bool:
        return self._folder is not None

    def __iter__(self) -> Iterator[tuple[str, LoadedVersions]]:
        return iter(sorted(self._adapters.items()))

    def of(self, adapter: str) -> LoadedVersions:
        return self._adapters.get(adapter, LoadedVersions())

    def number_of(self, adapter: str, digest: str) -> int | None:
        """The number that this content has as a version of the adapter; None if it has none yet."""
        return self.of(adapter).numbers.get(digest)

    def copy_of(self, ref: AdapterRef) -> Path | None:
        """The folder for a copy of a version; None if nothing is kept."""
        return self._folder / ref.name / f"version-{ref.version}" if self._folder else None

    def holds(self, folder: Path) -> bool:
        """Whether a folder is one of the run's."""
        return self._folder is not None and folder.is_relative_to(self._folder)

    def number(self, ref: AdapterRef, digest: str) -> None:
        """Keeps the number of a content. Call this before a request can use the version.

        Raises:
            ConflictError: the adapter's name differs from another one's only in upper and lower case.
            StorageError: the disk failed.
        """
        with self._lock:
            old = self.of(ref.name)
            if self and old.numbers.get(digest) != ref.version:
                numbers = [(other, number) for other, number in old.numbers.items() if other != digest]
                newest = dict([*numbers, (digest, ref.version)][-_CONTENTS:])
                self._write(ref.name, replace(old, numbers=newest, last=max(old.last, ref.version)))

    def set_live(self, adapter: str, live: Sequence[int], found: int | None, known: Collection[int]) -> None:
        """Keeps which versions are live and were live before, and removes the copies of versions that are not `known`.
        Raises as `number`."""
        with self._lock:
            old, new = self.of(adapter), tuple(live)
            if self and (old.live, old.found) != (new, found):
                self._write(adapter, replace(old, live=new, found=found, at=time.time()))
                self._prune(adapter, known)

    def forget(self, adapter: str) -> None:
        """Forgets an adapter, whose folder is being removed."""
        with self._lock:
            self._adapters = {name: versions for name, versions in self._adapters.items() if name != adapter}

    def _write(self, adapter: str, versions: LoadedVersions) -> None:
        assert self._folder is not None
        for other in self._adapters:
            if other != adapter and other.casefold() == adapter.casefold():
                raise ConflictError(f"{adapter} and {other} would share a folder on some disks: use another name")
        path = self._folder / adapter / FILE
        try:
            atomic.make_folder(path.parent)
            atomic.replace_file(path, _FILE.dump_json(versions, indent=2) + b"\n")
        except OSError as error:
            raise StorageError(
                f"the versions of {adapter} cannot be kept for a restart: {error.strerror}; make room on the disk "
                "and try again"
            ) from error
        self._adapters = {**self._adapters, adapter: versions}

    def _prune(self, adapter: str, known: Collection[int]) -> None:
        assert self._folder is not None
        for path in (self._folder / adapter).iterdir():
            match = _COPY.fullmatch(path.name)
            if match and int(match[1]) not in known:
                atomic.remove(atomic.hide(path))


def _read(path: Path) -> LoadedVersions:
    try:
        return _FILE.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): restore it from a backup, or remove it, and the "
            "numbers of versions begin again"
        ) from error
