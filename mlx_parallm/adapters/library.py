"""AdapterLibrary finds adapters on disk: in the adapter folder, under the allowed roots, and in checkpoints."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from mlx_parallm import atomic
from mlx_parallm.adapters.checkpoints import CheckpointStore, adapter_in
from mlx_parallm.adapters.files.disk import CONFIG_FILE, AdapterRoots, read_config
from mlx_parallm.adapters.files.formats import FormatName, is_scorer
from mlx_parallm.adapters.files.read import AdapterFile, read_adapter
from mlx_parallm.adapters.files.write import write_adapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, Version, VersionInfo
from mlx_parallm.atomic import new_folder
from mlx_parallm.core import AdapterRef, check_name
from mlx_parallm.errors import AdapterFileError, ConfigError, ConflictError, InvalidRequestError, StorageError

_log = logging.getLogger(__name__)

FolderStamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of each file of an adapter's directory."""


class AdapterLibrary:
    """Reads and checks adapter files. Any thread may use it. `read`, `read_again` and `discover` block on the disk, so
    call them neither on the event loop nor on the device thread.

    Args:
        folder: each subfolder is an adapter, served by the subfolder's name.
        roots: more folders that adapters may be read from by path.
        checkpoints: None if there is no checkpoint folder.
        kept: what is kept of the versions that are loaded from folders.
        belongs: whether the adapter in a subfolder of `folder` is for this base model.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        max_rank: int,
        folder: Path | None = None,
        roots: Sequence[Path] = (),
        checkpoints: CheckpointStore | None = None,
        kept: KeptVersions | None = None,
        belongs: Callable[[Path], bool] = lambda folder: True,
    ) -> None:
        self._belongs = belongs
        self.kept = KeptVersions() if kept is None else kept
        self.layout = layout
        self.max_rank = max_rank
        self.checkpoints = checkpoints
        self._folder = folder
        self.roots = AdapterRoots([*([folder] if folder else []), *roots], adapter_in)

    def read(self, path: str) -> AdapterFile:
        """Reads the adapter at a path that a client gave.

        Raises:
            InvalidRequestError: the path is not inside an allowed root.
            AdapterFileError: its files cannot be used.
        """
        file = read_adapter(self.roots.resolve(path), self.layout, self.max_rank, self.roots)
        if file.info.warning:
            _log.warning("adapter %s: %s", file.info.root, file.info.warning)
        return file

    def read_anywhere(self, folder: Path) -> AdapterFile:
        """Reads the adapter in a folder that this program itself names. Raises AdapterFileError as `read` does."""
        return read_adapter(adapter_in(folder), self.layout, self.max_rank)

    def write(self, weights: AdapterWeights, folder: Path, form: FormatName) -> None:
        """Writes an adapter in one of the two formats. `folder` must not exist."""
        with new_folder(folder) as aside:
            write_adapter(aside, form, weights, self.layout)

    def write_copy(self, weights: AdapterWeights, folder: Path) -> str:
        """Writes a copy of a version into the folder of the run, in place of an incomplete one. Returns its digest.

        Raises:
            StorageError: the disk failed.
        """
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self.write(weights, folder, "mlx-lm")
        except OSError as error:
            raise StorageError(f"{folder.name} of {folder.parent.name} was not written: {error.strerror}") from error
        return self.read_anywhere(folder).info.digest

    def read_again(self, version: Version) -> AdapterWeights:
        """Reads a version's weights again, as they were when it was added.

        Raises:
            AdapterFileError, UnknownModelError: the files are gone, damaged or changed.
        """
        if version.info.checkpoint and self.checkpoints:
            return self.checkpoints.load_checkpoint(version.ref.name, version.info.checkpoint).weights
        folder = Path(version.info.root)
        file = read_adapter(folder, self.layout, self.max_rank, None if self.kept.holds(folder) else self.roots)
        if file.info.digest != version.info.digest:
            raise AdapterFileError(f"the files of {version.ref} have changed: load them again as a new version")
        return file.weights

    def discover(self) -> Iterator[tuple[str, AdapterFile]]:
        """Yields the name and the content of each adapter in the folder. Skips reward models, which are scorers, and
        unusable adapters with a warning."""
        for path in sorted(self._folder.iterdir()) if self._folder else ():
            if not has_adapter(path) or not self._belongs(path):
                continue
            try:
                if is_scorer(read_config(path, None)):
                    continue
                yield check_name(path.name), self.read(path.name)
            except InvalidRequestError as error:
                _log.warning("adapter %s is skipped: %s", path.name, error)

    def find_checkpoint(self, adapter: str, which: str) -> tuple[AdapterRef, VersionInfo] | None:
        """The version in the checkpoint `which` (a name, a tag, or `latest`), None if there is none. Reads no file."""
        card = self.checkpoints.find(adapter, which) if self.checkpoints else None
        return (card.adapter, VersionInfo.of_checkpoint(card)) if card else None

    def forget(self, adapter: str) -> None:
        """Forgets an adapter, whose files are being removed."""
        self.kept.forget(adapter)
        if self.checkpoints:
            self.checkpoints.forget(adapter)

    def info_of(self, ref: AdapterRef) -> VersionInfo:
        """The facts about a version that is in a checkpoint or in a copy of the run.

        Raises:
            AdapterFileError: it is in neither, or its files are damaged.
        """
        cards = self.checkpoints.cards(ref.name) if self.checkpoints else ()
        if card := next((card for card in reversed(cards) if card.adapter == ref), None):
            return VersionInfo.of_checkpoint(card)
        folder = self.kept.copy_of(ref)
        if folder is None or not folder.is_dir():
            raise AdapterFileError(f"the run has no copy of it: load {ref.name} again")
        return self.read_anywhere(folder).info

    def newest_save(self, adapter: str) -> int:
        """When the newest checkpoint of an adapter was saved, in Unix time; 0 if there is none."""
        return max((card.created for card in self.checkpoints.cards(adapter)), default=0) if self.checkpoints else 0

    def first_version(self, adapter: str) -> int:
        """The first version number that no version of this adapter has had, as far as it was kept."""
        saved = self.checkpoints.newest_version(adapter) if self.checkpoints else 0
        return 1 + max(saved, self.kept.of(adapter).last)

    def found_by_start(self, adapter: str, versions: Iterable[Version]) -> int | None:
        """The number of the version that a start of the server would find if it were now: the one in the latest
        checkpoint or, without checkpoints, the one of these `versions` whose files are in the adapter folder."""
        if self.checkpoints and (card := self.checkpoints.find(adapter, "latest")):
            return card.adapter.version
        root = os.path.realpath(self._folder.expanduser() / adapter) if self._folder else None
        in_folder = (version for version in versions if version.info.root == root and version.readable)
        return next((version.ref.version for version in in_folder if version.ref.name == adapter), None)


def has_adapter(folder: Path) -> bool:
    """Whether a folder seems to be an adapter's."""
    return (folder / CONFIG_FILE).is_file()


def stamp_of(folder: Path) -> FolderStamp:
    """What changes whenever the files of an adapter's directory are written."""
    stamp = []
    for file in sorted(folder.glob("adapter*")):  # the names of all of them begin so
        with suppress(FileNotFoundError):
            facts = file.stat()
            stamp.append((file.name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(stamp)


def name_of_folder(folder: Path) -> str:
    """The name that the adapter in `folder` gets if nobody names it. It is plain, and different for every folder."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', folder.name)[:48]}.{digest}"


VERSIONS_FILE = "versions.json"
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


_LOADED = TypeAdapter(LoadedVersions)


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
        self._adapters = {path.parent.name: _read(path) for path in folder.glob(f"*/{VERSIONS_FILE}")} if folder else {}

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
        path = self._folder / adapter / VERSIONS_FILE
        try:
            atomic.make_folder(path.parent)
            atomic.replace_file(path, _LOADED.dump_json(versions, indent=2) + b"\n")
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
        return _LOADED.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): restore it from a backup, or remove it, and the "
            "numbers of versions begin again"
        ) from error
