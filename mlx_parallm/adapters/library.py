"""AdapterLibrary finds adapters on disk: in the adapter folder, under the allowed roots, and in checkpoints."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.adapters.checkpoints.folders import adapter_in
from mlx_parallm.adapters.checkpoints.store import CheckpointStore
from mlx_parallm.adapters.files.disk import CONFIG_FILE, AdapterRoots
from mlx_parallm.adapters.files.peft import PEFT_WEIGHTS
from mlx_parallm.adapters.files.read import MLX_LM_WEIGHTS, AdapterFile, FormatName, read_adapter
from mlx_parallm.adapters.files.reward_model import is_reward_model
from mlx_parallm.adapters.files.write import write_mlx_lm, write_peft
from mlx_parallm.adapters.kept import KeptVersions
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair, Version, VersionInfo
from mlx_parallm.atomic import new_folder
from mlx_parallm.core import AdapterRef, CheckpointCard, check_name
from mlx_parallm.errors import AdapterFileError, InvalidRequestError, StorageError

_log = logging.getLogger(__name__)

FolderStamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of change of each file that an adapter's directory may have; None for one that it has not."""


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
        self._roots = AdapterRoots([*([folder] if folder else []), *roots], adapter_in)

    def read(self, path: str) -> AdapterFile:
        """Reads the adapter at a path that a client gave.

        Raises:
            InvalidRequestError: the path is not inside an allowed root.
            AdapterFileError: its files cannot be used.
        """
        file = read_adapter(self.resolve(path), self.layout, self.max_rank, self._roots)
        if file.warning:
            _log.warning("adapter %s: %s", file.path, file.warning)
        return file

    def read_anywhere(self, folder: Path) -> AdapterFile:
        """Reads the adapter in a folder that this program itself names. Raises AdapterFileError as `read` does."""
        return read_adapter(adapter_in(folder), self.layout, self.max_rank)

    def resolve_stamped(self, path: str) -> tuple[Path, FolderStamp]:
        """The adapter's directory (see `AdapterRoots.resolve`), and what changes whenever its files are written."""
        folder = self._roots.resolve(path)
        return folder, stamp_of(folder)

    def resolve(self, path: str) -> Path:
        """The real path of the adapter that a path means; see `AdapterRoots.resolve` and `adapter_in`."""
        return self._roots.resolve(path)

    def write(self, weights: AdapterWeights, folder: Path, form: FormatName) -> None:
        """Writes an adapter in one of the two formats. `folder` must not exist."""
        with new_folder(folder) as aside:
            if form == "peft":
                write_peft(aside, weights, self.layout, base_model=None)
            else:
                write_mlx_lm(aside, weights, self.layout)

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
        return self.read_anywhere(folder).digest

    def read_again(self, version: Version) -> AdapterWeights:
        """Reads a version's weights again, as they were when it was added.

        Raises:
            AdapterFileError, UnknownModelError: the files are gone, damaged or changed.
        """
        if version.info.checkpoint and self.checkpoints:
            return self.checkpoints.load_checkpoint(version.ref.name, version.info.checkpoint).weights
        folder = Path(version.info.root)
        file = read_adapter(folder, self.layout, self.max_rank, None if self.kept.holds(folder) else self._roots)
        if file.digest != version.info.digest:
            raise AdapterFileError(f"the files of {version.ref} have changed: load them again as a new version")
        return file.weights

    def neutral(self, rank: int, targets: Sequence[str]) -> AdapterWeights:
        """Weights of zeros, for the linears whose last names are among the targets."""
        specs = [spec for spec in self.layout.named(targets) if spec is not self.layout.head]
        pairs = {spec.path: LoRAPair(_zeros(spec.a_shape(rank)), _zeros(spec.b_shape(rank)), 1.0) for spec in specs}
        return AdapterWeights(pairs)

    def discover(self) -> Iterator[tuple[str, AdapterFile]]:
        """Yields the name and the content of each adapter in the folder. Skips reward models, which are scorers, and
        unusable adapters with a warning."""
        for path in sorted(self._folder.iterdir()) if self._folder else ():
            if not has_adapter(path) or not self._belongs(path):
                continue
            try:
                if is_reward_model(path):
                    continue
                yield check_name(path.name), self.read(path.name)
            except InvalidRequestError as error:
                _log.warning("adapter %s is skipped: %s", path.name, error)

    def find_checkpoint(self, adapter: str, which: str) -> tuple[AdapterRef, VersionInfo] | None:
        """The version in the checkpoint `which` (a name, a tag, or `latest`), None if there is none. Reads no file."""
        card = self.checkpoints.find(adapter, which) if self.checkpoints else None
        return (card.adapter, info_of_checkpoint(card)) if card else None

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
            return info_of_checkpoint(card)
        folder = self.kept.copy_of(ref)
        if folder is None or not folder.is_dir():
            raise AdapterFileError(f"the run has no copy of it: load {ref.name} again")
        return info_of_file(self.read_anywhere(folder))

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


def _zeros(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def has_adapter(folder: Path) -> bool:
    """Whether a folder seems to be an adapter's."""
    return (folder / CONFIG_FILE).is_file()


def stamp_of(folder: Path) -> FolderStamp:
    """What changes whenever the files of an adapter's directory are written."""
    return tuple(map(_stamp, (folder / CONFIG_FILE, folder / PEFT_WEIGHTS, folder / MLX_LM_WEIGHTS)))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def name_of_folder(folder: Path) -> str:
    """The name that the adapter in `folder` gets if nobody names it. It is plain, and different for every folder."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', folder.name)[:48]}.{digest}"


def info_of_file(file: AdapterFile) -> VersionInfo:
    weights = file.weights
    facts = (weights.rank, weights.alpha, weights.targets, file.nbytes, file.digest, str(file.path))
    return VersionInfo(*facts, warning=file.warning)


def info_of_checkpoint(card: CheckpointCard, digest: str = "") -> VersionInfo:
    """Facts about a checkpoint's version. `digest`: `AdapterFile.digest` if the files have been read."""
    return VersionInfo(card.rank, card.alpha, card.targets, card.bytes, digest, card.path, card.name)
