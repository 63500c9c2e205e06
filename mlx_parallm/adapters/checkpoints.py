"""CheckpointStore: adapter versions on disk, written whole or not at all.

    <folder>/<adapter>/checkpoint-7/   adapters.safetensors, adapter_config.json, manifest.json, what `extra` added
    <folder>/<adapter>/latest          one line: the checkpoint saved last, or the one chosen since with `set_latest`
    <folder>/<adapter>/tags.json       tag → checkpoint name

The manifest has facts about the checkpoint, and checksums of each of its files and of itself.

A save fills `.tmp-<random>/`, fsyncs it and renames it. A checkpoint to be pruned is renamed before it is removed. So a
folder with a checkpoint's name is always complete, and a crash loses at most the save that it interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

import mlx_parallm
from mlx_parallm import atomic
from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import MLX_LM_WEIGHTS, write_mlx_lm
from mlx_parallm.adapters.runs import LATEST, MANIFEST, TAGS, TAGS_TYPE, is_run, step_of, stored_latest
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, VersionInfo
from mlx_parallm.core.adapters import AdapterRef, check_name, check_tag
from mlx_parallm.errors import (
    AdapterFileError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    StorageError,
    UnknownModelError,
)

_log = logging.getLogger(__name__)

MAX_STEP = 10**15 - 1
_MAX_METRICS = 256
MAX_BYTES = 1 << 20
"""Of a manifest."""

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


class FileSum(BaseModel):
    """Checksum and size of one file of a checkpoint."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    sha256: Sha256
    bytes: NonNegativeInt


class Sealed(BaseModel):
    """Facts about a folder of files, and their checksums.

    `metrics`: of the training. `created`: Unix time in seconds; a checkpoint never has an earlier one than those that
    were saved before, even if the clock was set back. `files`: checksum and size by file name. `checksum`:
    SHA-256 of the JSON of all other fields; set only in a manifest that `parse` returned.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    base_fingerprint: str
    metrics: dict[str, FiniteFloat]
    created: NonNegativeInt
    mlx_parallm: str
    files: Annotated[dict[FileName, FileSum], Field(min_length=1)]
    checksum: str = ""

    def render(self) -> bytes:
        """The content of the file, with its checksum."""
        body = self.model_dump(mode="json", exclude={"checksum"})
        return _dump({**body, "checksum": hashlib.sha256(_dump(body)).hexdigest()})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Reads a manifest that `render` wrote, and checks that it is unchanged.

        Raises:
            ValueError: a field is missing, unknown, of a wrong type, or was changed.
        """
        manifest = cls.model_validate_json(data)
        if manifest.render() != data:
            raise ValueError("it was changed after it was written")
        return manifest


class Manifest(Sealed):
    """The content of a checkpoint's `manifest.json`."""

    adapter: str
    version: NonNegativeInt
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    rank: PositiveInt
    alpha: FiniteFloat
    targets: tuple[str, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of checkpoints: oldest first, and by step within the same second."""
        return self.created, self.step


def seal(
    folder: Path,
    version: AdapterRef,
    step: int,
    weights: AdapterWeights,
    metrics: dict[str, float],
    fingerprint: str,
    not_before: int,
) -> Manifest:
    """Fsyncs all files in `folder`, then writes the manifest there. Step and metrics have been checked. `not_before`:
    the least `created`.

    Raises:
        ValueError: an entry of `folder` is not a plain file, or has a name that `FileName` does not allow.
    """
    data = Manifest(
        adapter=version.name,
        version=version.version,
        step=step,
        base_fingerprint=fingerprint,
        rank=weights.rank,
        alpha=weights.alpha,
        targets=weights.targets,
        metrics=metrics,
        created=max(int(time.time()), not_before),
        mlx_parallm=mlx_parallm.__version__,
        files=file_sums(folder),
    ).render()
    atomic.write_file(folder / MANIFEST, data)
    atomic.sync(folder)
    return Manifest.parse(data)


def file_sums(folder: Path) -> dict[str, FileSum]:
    """Fsyncs all files in `folder`, and returns their checksums.

    Raises:
        ValueError: an entry is not a plain file, or is a manifest.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name == MANIFEST:
            raise ValueError(f"{path.name} cannot be part of a checkpoint: plain files only")
        atomic.sync(path)
        files[path.name] = file_sum(path)
    return files


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest in `folder`, and checks that it belongs to the checkpoint and adapter that the path names.

    Raises:
        ValueError, OSError: it is missing, damaged or of another checkpoint.
    """
    with (folder / MANIFEST).open("rb") as file:
        manifest = Manifest.parse(file.read(MAX_BYTES))
    if (manifest.adapter, checkpoint_name(manifest.step)) != (folder.parent.name, folder.name):
        raise ValueError(f"it is {checkpoint_name(manifest.step)} of {manifest.adapter}")
    return manifest


def verify(folder: Path, manifest: Manifest) -> None:
    """Checks the files in `folder` against the checksums.

    Raises:
        AdapterFileError: a file is missing, truncated or changed. The message names it.
    """
    try:
        stored = read_manifest(folder)
    except (ValueError, OSError):
        stored = None
    if stored != manifest:
        raise _damaged(folder, MANIFEST)
    for name, expected in manifest.files.items():
        try:
            found = file_sum(folder / name)
        except OSError:
            found = None
        if found != expected:
            raise _damaged(folder, name)


def file_sum(path: Path) -> FileSum:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileSum(sha256=digest, bytes=file.tell())


def check_step(step: int) -> int:
    """Returns `step`. Raises InvalidRequestError if it is not between 0 and MAX_STEP."""
    if not 0 <= step <= MAX_STEP:
        raise InvalidRequestError(f"step must be between 0 and {MAX_STEP}", param="step")
    return step


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as Python floats.

    Raises:
        InvalidRequestError: there are too many, a name is not printable, or a value is not a finite number.
    """
    if len(metrics) > _MAX_METRICS:
        raise InvalidRequestError(f"{len(metrics)} metrics: store at most {_MAX_METRICS}", param="metrics")
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        if not (0 < len(name) <= 128 and name.isprintable()):
            raise InvalidRequestError("a metric's name must have 1 to 128 printable characters", param="metrics")
        with suppress(TypeError, ValueError, OverflowError):
            checked[name] = float(value)
        if not math.isfinite(checked.get(name, math.nan)):
            raise InvalidRequestError(f"the metric {name} is not a finite number: leave it out", param="metrics")
    return checked


def _damaged(folder: Path, name: str) -> AdapterFileError:
    checkpoint = f"{folder.parent.name}/{folder.name}"
    return AdapterFileError(
        f"{checkpoint}/{name} is damaged or missing: bring {checkpoint} back from a backup, or delete that folder "
        "and name another checkpoint"
    )


def _dump(body: dict[str, object]) -> bytes:
    return (json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


class CheckpointFolder:
    """The checkpoints of one adapter, in its folder at `path`. Reads what is there.

    Each change replaces a whole attribute, so that other threads can read without a lock.

    Attributes:
        manifests: by checkpoint name.
        tags: tag → checkpoint name.
        latest: the name of the checkpoint that a request for `latest` gets, None only if there is none.
        newest_version: the largest adapter version saved here, including those of checkpoints that this process has
            pruned.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifests: Mapping[str, Manifest] = {}
        self.newest_version = 0
        for name in self._names():
            try:
                self._add(name, read_manifest(path / name))
            except (ValueError, OSError) as error:
                _log.warning("%s is skipped, its manifest cannot be used: %s", path / name, error)
        self.tags: Mapping[str, str] = self._read_tags()
        self.latest = self._read_latest()

    def resolve(self, which: str) -> Manifest | None:
        """The manifest of the checkpoint that `which` means (a name, a tag or `latest`), None if there is none."""
        return self.manifests.get((self.latest or "") if which == LATEST else self.tags.get(which, which))

    def card(self, manifest: Manifest) -> CheckpointCard:
        name = checkpoint_name(manifest.step)
        tags = [tag for tag, target in self.tags.items() if target == name]
        return CheckpointCard(
            name=name,
            adapter=AdapterRef(manifest.adapter, manifest.version),
            step=manifest.step,
            path=str(self.path / name),
            created=manifest.created,
            tags=tuple(sorted(tags + [LATEST] * (name == self.latest))),
            metrics=manifest.metrics,
            rank=manifest.rank,
            alpha=manifest.alpha,
            targets=manifest.targets,
            bytes=manifest.files[MLX_LM_WEIGHTS].bytes if MLX_LM_WEIGHTS in manifest.files else 0,
        )

    def next_step(self) -> int:
        """One more than the largest step on disk, damaged checkpoints included."""
        return 1 + max((step for step in map(step_of, self._names()) if step is not None), default=0)

    def place(self, aside: Path, manifest: Manifest) -> bool:
        """Renames `aside` to the checkpoint's name. Returns False if one with the same content is there."""
        name = checkpoint_name(manifest.step)
        there = self.manifests.get(name)
        if there is not None and there.files == manifest.files:
            return False
        if (self.path / name).exists():
            raise ConflictError(
                f"{manifest.adapter} has a {name} with other content: save under another step, or without one"
            )
        os.rename(aside, self.path / name)
        self._add(name, manifest)
        self.latest = self.latest or name
        return True

    def tag(self, name: str, tags: Sequence[str]) -> None:
        """Gives a checkpoint these tags, and takes them from those that had them."""
        self._set_tags({**self.tags, **dict.fromkeys(tags, name)})

    def untag(self, tag: str) -> None:
        """Takes a tag from the checkpoint that has it."""
        self._set_tags({other: name for other, name in self.tags.items() if other != tag})

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        if tags != self.tags:
            atomic.replace_file(self.path / TAGS, (json.dumps(tags, indent=2, sort_keys=True) + "\n").encode())
            self.tags = tags

    def set_latest(self, name: str) -> None:
        atomic.replace_file(self.path / LATEST, f"{name}\n".encode())
        self.latest = name

    def prune(self, keep: int, in_use: Callable[[str], bool]) -> None:
        """Removes all checkpoints but the newest `keep`, the tagged ones, the latest, and those in use. Disk errors are
        only logged."""
        oldest_first = sorted(self.manifests, key=lambda name: self.manifests[name].order)
        kept = {*oldest_first[max(0, len(oldest_first) - keep) :], *self.tags.values(), self.latest}
        for name in oldest_first:
            path = self.path / name
            if name in kept or in_use(str(path)):
                continue
            try:
                trash = atomic.hide(path) if path.exists() else None
            except OSError as error:
                _log.warning("%s could not be pruned: %s", path, error.strerror)
                continue
            self.manifests = {other: manifest for other, manifest in self.manifests.items() if other != name}
            if trash is not None:
                atomic.remove(trash)

    def remove(self, names: Collection[str]) -> None:
        """Removes checkpoints, whatever their tags are. `latest` is then the newest of the others, if it was one of
        them."""
        self.manifests = {name: manifest for name, manifest in self.manifests.items() if name not in names}
        self._set_tags({tag: name for tag, name in self.tags.items() if name not in names})
        if self.latest in names:
            newest = max(self.manifests, key=lambda name: self.manifests[name].order, default=None)
            if newest is not None:
                self.set_latest(newest)
            else:
                (self.path / LATEST).unlink(missing_ok=True)
                self.latest = None
        for path in (self.path / name for name in names):
            if path.exists():
                atomic.remove(atomic.hide(path))

    def _add(self, name: str, manifest: Manifest) -> None:
        self.manifests = {**self.manifests, name: manifest}
        self.newest_version = max(self.newest_version, manifest.version)

    def _names(self) -> list[str]:
        """The names of folders that are named like checkpoints."""
        return [entry.name for entry in self.path.iterdir() if step_of(entry.name) is not None and entry.is_dir()]

    def _read_tags(self) -> dict[str, str]:
        """The tags of checkpoints that exist. If the file is damaged, all checkpoints get a tag, so that none is
        pruned."""
        path = self.path / TAGS
        try:
            stored = TAGS_TYPE.validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            _log.warning("%s cannot be used, so every checkpoint there gets a tag kept-<step>: %s", path, error)
            return {f"kept-{manifest.step}": name for name, manifest in self.manifests.items()}
        tags = {tag: name for tag, name in stored.items() if name in self.manifests and _is_tag(tag)}
        for tag in stored.keys() - tags.keys():
            _log.warning("%s: tag %r is dropped: it is not valid, or %r is no checkpoint", path, tag, stored[tag])
        return tags

    def _read_latest(self) -> str | None:
        """The checkpoint that the file `latest` names. If that one is missing or damaged, the undamaged checkpoint with
        the highest step is taken; if all are damaged, the one with the highest step."""
        named = stored_latest(self.path / LATEST)
        by_step = sorted(self.manifests, key=lambda name: self.manifests[name].step, reverse=True)
        for name in sorted(by_step, key=lambda name: name != named):
            try:
                verify(self.path / name, self.manifests[name])
            except AdapterFileError as error:
                _log.warning("%s", error)
                continue
            if name != named:
                _log.warning("%s names no checkpoint that can be used: %s is used instead", self.path / LATEST, name)
            return name
        return by_step[0] if by_step else None


def read_folders(folder: Path) -> Iterator[CheckpointFolder]:
    """Reads the folder of each adapter in `folder`, and removes what interrupted saves left there. Folders of other
    runs are left alone.

    Raises:
        OSError: a folder cannot be read.
    """
    for path in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        if is_run(path):
            continue
        try:
            check_name(path.name)
        except InvalidRequestError:
            _log.warning("%s is skipped: its name is not one that an adapter can have", path)
            continue
        atomic.sweep(path)
        yield CheckpointFolder(path)


def _is_tag(tag: str) -> bool:
    try:
        check_tag(tag)
    except InvalidRequestError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint's weights, which have passed every check. `info`: of the version, with the digest of its files."""

    card: CheckpointCard
    weights: AdapterWeights
    info: VersionInfo


class CheckpointStore:
    """Saves, finds, loads and prunes checkpoints. Weights are NumPy arrays. Safe to call from any thread.

    `find`, `cards` and `newest_version` never wait. All other methods touch the disk and hold a lock.

    Attributes:
        in_use: says of a card's `path` whether a version is served from the files there. Such a checkpoint is not
            pruned. The owner sets this function. It is called while the lock is held, so it must not save, tag or load.
        saves_total: number of new checkpoints.
    """

    def __init__(self, folder: Path, layout: AdapterLayout, fingerprint: str, max_rank: int, keep: int = 10) -> None:
        """Reads the checkpoints in `folder`, which is made if it does not exist.

        Args:
            fingerprint: identifies the base model.
            keep: the newest `keep` checkpoints of each adapter are not pruned.

        Raises:
            ConfigError: the folder cannot be made or read.
        """
        self.in_use: Callable[[str], bool] = lambda _path: False
        self.saves_total = 0
        self._folder = folder
        self._layout = layout
        self._fingerprint = fingerprint
        self._max_rank = max_rank
        self._keep = keep
        self._lock = threading.Lock()
        try:
            atomic.make_folder(folder)
            self._folders = {adapter.path.name: adapter for adapter in read_folders(folder)}
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be kept in {folder} ({error.strerror}): give --checkpoint-dir a folder that this "
                "user can write"
            ) from error

    # ---- reading ------------------------------------------------------------------------------------

    def find(self, adapter_name: str, which: str) -> CheckpointCard | None:
        """The checkpoint named `which`: `checkpoint-<step>`, a tag or `latest`. None if there is none."""
        folder = self._folders.get(adapter_name)
        manifest = folder.resolve(which) if folder else None
        return folder.card(manifest) if folder and manifest else None

    def cards(self, adapter_name: str | None = None) -> tuple[CheckpointCard, ...]:
        """All checkpoints, or those of one adapter, oldest first."""
        folders = [folder for name, folder in self._folders.items() if adapter_name in (None, name)]
        cards = [folder.card(manifest) for folder in folders for manifest in folder.manifests.values()]
        return tuple(sorted(cards, key=lambda card: (card.created, card.step, card.adapter.name)))

    def newest_version(self, adapter_name: str) -> int:
        """The largest version of that adapter known to have been saved, 0 if none."""
        folder = self._folders.get(adapter_name)
        return folder.newest_version if folder else 0

    def load_checkpoint(self, adapter_name: str, which: str = LATEST) -> LoadedCheckpoint:
        """Reads a checkpoint's weights, after checking all checksums and the base model's fingerprint.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: a file is damaged, or the checkpoint belongs to another base model.
        """
        with self._lock:
            folder, manifest = self._named(adapter_name, which)
            card = folder.card(manifest)
            verify(Path(card.path), manifest)
            if manifest.base_fingerprint != self._fingerprint:
                raise AdapterFileError(
                    f"{adapter_name}/{card.name} was made for the base model {manifest.base_fingerprint}, and "
                    f"{self._fingerprint} is served: serve that model, or name another checkpoint"
                )
            file = read_adapter(Path(card.path), self._layout, self._max_rank)
            info = replace(VersionInfo.of_checkpoint(card), digest=file.info.digest)
            return LoadedCheckpoint(card, file.weights, info)

    # ---- writing ------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        adapter: AdapterRef,
        weights: AdapterWeights,
        step: int | None = None,
        tags: Sequence[str] = (),
        metrics: Mapping[str, float] | None = None,
        extra: Callable[[Path], None] | None = None,
    ) -> CheckpointCard:
        """Writes a version as checkpoint `step` (None: the next free step), then prunes old checkpoints.

        If a checkpoint of that step with the same content exists, it keeps its version and metrics and gets the tags,
        and nothing is pruned.

        Args:
            extra: called with the folder that is being filled. It may add files, such as an optimizer's state, but no
                folders.

        Raises:
            InvalidRequestError: the name, a tag, a metric or the step cannot be stored, or the weights could not be
                loaded back (AdapterFileError).
            ConflictError: there is a checkpoint of that step with other content, or the adapter's name differs from
                another one's only in upper and lower case.
            StorageError: the disk failed; earlier checkpoints are untouched.
        """
        check_name(adapter.name)
        tags, numbers = [check_tag(tag) for tag in tags], check_metrics(metrics or {})
        with self._lock:
            with _disk(f"a checkpoint of {adapter.name} was not saved"):
                folder = self._opened(adapter.name)
                step = check_step(folder.next_step() if step is None else step)
                with atomic.folder_aside(folder.path) as aside:
                    write_mlx_lm(aside, weights, self._layout)
                    read_adapter(aside, self._layout, self._max_rank)
                    if extra is not None:
                        extra(aside)
                    last = max((manifest.created for manifest in folder.manifests.values()), default=0)
                    manifest = seal(aside, adapter, step, weights, numbers, self._fingerprint, last)
                    new = folder.place(aside, manifest)
                self.saves_total += new
            name = checkpoint_name(step)
            with _disk(f"{name} of {adapter.name} is saved, but its tags or `latest` may not be"):
                atomic.sync(folder.path)
                folder.tag(name, tags)
                latest = folder.resolve(LATEST)  # an earlier one if this checkpoint's save was interrupted
                if new or latest is None or latest.order < folder.manifests[name].order:
                    folder.set_latest(name)
            if new:
                folder.prune(self._keep, self.in_use)
            return folder.card(folder.manifests[name])

    def tag(self, adapter_name: str, which: str, tag: str) -> CheckpointCard:
        """Gives a checkpoint a tag, and takes it from the one that had it. Tagged checkpoints are not pruned.

        Raises:
            UnknownModelError: there is no such checkpoint.
            InvalidRequestError: the tag is not a plain name.
            StorageError: the disk failed; the tag is unchanged.
        """
        check_tag(tag)
        with self._lock, _disk(f"the tag {tag} of {adapter_name} was not written"):
            folder, manifest = self._named(adapter_name, which)
            folder.tag(checkpoint_name(manifest.step), [tag])
            return folder.card(manifest)

    def untag(self, adapter_name: str, tag: str) -> None:
        """Takes a tag from the checkpoint that has it, which may then be pruned. Raises StorageError."""
        with self._lock, _disk(f"the tag {tag} of {adapter_name} was not removed"):
            if (folder := self._folders.get(adapter_name)) is not None:
                folder.untag(tag)

    def set_latest(self, adapter_name: str, which: str) -> CheckpointCard:
        """Makes `latest` mean an older checkpoint, from which training continues.

        Raises:
            UnknownModelError: there is no such checkpoint.
            StorageError: the disk failed; `latest` is unchanged.
        """
        with self._lock, _disk(f"`latest` of {adapter_name} was not written"):
            folder, manifest = self._named(adapter_name, which)
            folder.set_latest(checkpoint_name(manifest.step))
            return folder.card(manifest)

    def remove(self, adapter_name: str, names: Collection[str]) -> None:
        """Removes checkpoints of an adapter, also those with a tag and those from which a version is served.

        Raises:
            StorageError: the disk failed; some of them may remain.
        """
        with self._lock, _disk(f"not all checkpoints of {adapter_name} were removed"):
            if (folder := self._folders.get(adapter_name)) is not None:
                folder.remove(names)

    def forget(self, adapter_name: str) -> None:
        """Forgets the checkpoints of an adapter, whose folder is being removed."""
        with self._lock:
            self._folders = {name: folder for name, folder in self._folders.items() if name != adapter_name}

    def _opened(self, adapter_name: str) -> CheckpointFolder:
        """The adapter's folder, which is made if needed. Removes what interrupted saves left there."""
        for other in self._folders:
            if other != adapter_name and other.casefold() == adapter_name.casefold():
                raise ConflictError(f"{adapter_name} and {other} would share a folder on some disks: use another name")
        path = self._folder / adapter_name
        atomic.make_folder(path)
        atomic.sweep(path)
        if adapter_name not in self._folders:
            self._folders = {**self._folders, adapter_name: CheckpointFolder(path)}
        return self._folders[adapter_name]

    def _named(self, adapter_name: str, which: str) -> tuple[CheckpointFolder, Manifest]:
        folder = self._folders.get(adapter_name)
        manifest = folder.resolve(which) if folder else None
        if folder is None or manifest is None:
            raise UnknownModelError(f"{adapter_name!r} has no checkpoint {which!r}: GET /v1/checkpoints lists them")
        return folder, manifest


@contextmanager
def _disk(outcome: str) -> Iterator[None]:
    """Turns OSError into a StorageError whose message begins with `outcome` and has no paths."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{outcome}: {atomic.reason_of(error)}") from error
