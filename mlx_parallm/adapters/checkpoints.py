"""CheckpointStore: adapter versions on disk, written whole or not at all.

    <folder>/<adapter>/checkpoint-7/   adapters.safetensors, adapter_config.json, manifest.json, what `extra` added
    <folder>/<adapter>/latest          one line: the checkpoint saved last, or the one chosen since with `set_latest`
    <folder>/<adapter>/tags.json       tag → checkpoint name

A save fills `.tmp-<random>/`, fsyncs it and renames it. A checkpoint to be pruned is renamed before it is removed. So a
folder with a checkpoint's name is always complete, and a crash loses at most the save that it interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from mlx_parallm import atomic
from mlx_parallm.adapters.files.read import read_adapter
from mlx_parallm.adapters.files.write import write_mlx_lm
from mlx_parallm.adapters.manifest import (
    MANIFEST,
    Manifest,
    SavedVersion,
    check_metrics,
    check_step,
    checkpoint_name,
    read_manifest,
    seal,
    step_of,
    verify,
)
from mlx_parallm.adapters.runs import is_run
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights
from mlx_parallm.core import AdapterRef, CheckpointCard, check_name, check_tag
from mlx_parallm.errors import (
    AdapterFileError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    StorageError,
    UnknownModelError,
)

LATEST = "latest"
TAGS = "tags.json"
WEIGHTS = "adapters.safetensors"

TAGS_TYPE = TypeAdapter(dict[str, str])
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The checkpoints in one adapter's folder at `path`; frozen, so that other threads can read it without a lock.

    `manifests`: by checkpoint name. `tags`: tag → checkpoint name. `latest`: the name of the checkpoint that a request
    for `latest` gets, None only if there is none. `newest_version`: the largest adapter version saved here, including
    those of checkpoints that this process has pruned.
    """

    path: Path
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    latest: str | None = None
    newest_version: int = 0

    def resolve(self, which: str) -> str | None:
        """The name of the checkpoint that `which` means (a name, a tag or `latest`), None if there is none."""
        name = self.latest if which == LATEST else self.tags.get(which, which)
        return name if name in self.manifests else None

    def card(self, name: str) -> CheckpointCard:
        manifest = self.manifests[name]
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
            bytes=manifest.files[WEIGHTS].bytes if WEIGHTS in manifest.files else 0,
        )

    def oldest_first(self) -> list[str]:
        return sorted(self.manifests, key=lambda name: self.manifests[name].order)

    def surplus(self, keep: int) -> list[str]:
        """Checkpoints to prune: all except the newest `keep`, the tagged ones, and the one that `latest` means."""
        names = self.oldest_first()
        kept = {*names[max(0, len(names) - keep) :], *self.tags.values(), self.latest}
        return [name for name in names if name not in kept]

    def adding(self, name: str, manifest: Manifest) -> CheckpointIndex:
        return replace(
            self,
            manifests={**self.manifests, name: manifest},
            latest=self.latest or name,
            newest_version=max(self.newest_version, manifest.version),
        )

    def without(self, name: str) -> CheckpointIndex:
        return replace(self, manifests={key: value for key, value in self.manifests.items() if key != name})

    def next_step(self) -> int:
        """One more than the largest step on disk, damaged checkpoints included."""
        return 1 + max((step for step in map(step_of, _names(self.path)) if step is not None), default=0)


def read_indexes(folder: Path) -> Iterator[CheckpointIndex]:
    """Reads the index of each adapter's folder in `folder`, and removes what interrupted saves left there. Folders of
    other runs are left alone.

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
        yield _read_index(path)


def render_tags(tags: Mapping[str, str]) -> bytes:
    return (json.dumps(tags, indent=2, sort_keys=True) + "\n").encode()


def _read_index(path: Path) -> CheckpointIndex:
    index = CheckpointIndex(path)
    for name in _names(path):
        try:
            index = index.adding(name, read_manifest(path / name))
        except (ValueError, OSError) as error:
            _log.warning("%s is skipped, its manifest cannot be used: %s", path / name, error)
    return replace(index, tags=_read_tags(index), latest=_read_latest(index))


def _names(path: Path) -> list[str]:
    """The names of folders that are named like checkpoints."""
    return [entry.name for entry in path.iterdir() if step_of(entry.name) is not None and entry.is_dir()]


def _read_tags(index: CheckpointIndex) -> dict[str, str]:
    """The tags of checkpoints that exist. If the file is damaged, all checkpoints get a tag, so that none is pruned."""
    path = index.path / TAGS
    try:
        stored = TAGS_TYPE.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        _log.warning("%s cannot be used, so every checkpoint there gets a tag kept-<step>: %s", path, error)
        return {f"kept-{manifest.step}": name for name, manifest in index.manifests.items()}
    tags = {tag: name for tag, name in stored.items() if name in index.manifests and _is_tag(tag)}
    for tag in stored.keys() - tags.keys():
        _log.warning("%s: tag %r is dropped: it is not valid, or %r is no checkpoint", path, tag, stored[tag])
    return tags


def _is_tag(tag: str) -> bool:
    try:
        check_tag(tag)
    except InvalidRequestError:
        return False
    return True


def _read_latest(index: CheckpointIndex) -> str | None:
    """The checkpoint that the file `latest` names. If that one is missing or damaged, the undamaged checkpoint with the
    highest step is taken; if all are damaged, the one with the highest step."""
    named = stored_latest(index.path / LATEST)
    by_step = sorted(index.manifests, key=lambda name: index.manifests[name].step, reverse=True)
    for name in sorted(by_step, key=lambda name: name != named):
        if _is_whole(index, name):
            if name != named:
                _log.warning("%s names no checkpoint that can be used: %s is used instead", index.path / LATEST, name)
            return name
    return by_step[0] if by_step else None


def stored_latest(path: Path) -> str:
    """The name in the file `latest`, empty if the file is missing or incomplete."""
    try:
        name, newline, rest = path.read_bytes().decode().partition("\n")
    except (ValueError, OSError):
        return ""
    return name if newline and not rest else ""


def _is_whole(index: CheckpointIndex, name: str) -> bool:
    try:
        verify(index.path / name, index.manifests[name])
    except AdapterFileError as error:
        _log.warning("%s", error)
        return False
    return True


T = TypeVar("T")
Extra = Callable[[Path], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint's weights, which have passed every check. `digest`: see `AdapterFile`."""

    card: CheckpointCard
    weights: AdapterWeights
    digest: str


class CheckpointStore:
    """Saves, finds, loads and prunes checkpoints. Weights are NumPy arrays. Safe to call from any thread.

    `find`, `cards` and `newest_version` read frozen indexes and never wait. All other methods touch the disk and hold a
    lock.

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
            self._indexes = {index.path.name: index for index in read_indexes(folder)}
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be kept in {folder} ({error.strerror}): give --checkpoint-dir a folder that this "
                "user can write"
            ) from error

    # ---- reading ------------------------------------------------------------------------------------

    def find(self, adapter_name: str, which: str) -> CheckpointCard | None:
        """The checkpoint named `which`: `checkpoint-<step>`, a tag or `latest`. None if there is none."""
        index = self._indexes.get(adapter_name)
        name = index.resolve(which) if index else None
        return index.card(name) if index and name else None

    def cards(self, adapter_name: str | None = None) -> tuple[CheckpointCard, ...]:
        """All checkpoints, or those of one adapter, oldest first."""
        indexes = [index for name, index in self._indexes.items() if adapter_name in (None, name)]
        cards = [index.card(name) for index in indexes for name in index.manifests]
        return tuple(sorted(cards, key=lambda card: (card.created, card.step, card.adapter.name)))

    def newest_version(self, adapter_name: str) -> int:
        """The largest version of that adapter known to have been saved, 0 if none."""
        index = self._indexes.get(adapter_name)
        return index.newest_version if index else 0

    def load_checkpoint(self, adapter_name: str, which: str = LATEST) -> LoadedCheckpoint:
        """Reads a checkpoint's weights, after checking all checksums and the base model's fingerprint.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: a file is damaged, or the checkpoint belongs to another base model.
        """
        with self._lock:
            index, name = self._named(adapter_name, which)
            folder, manifest = index.path / name, index.manifests[name]
            verify(folder, manifest)
            self._check_base(f"{adapter_name}/{name}", manifest)
            file = read_adapter(folder, self._layout, self._max_rank)
            return LoadedCheckpoint(index.card(name), file.weights, file.digest)

    def hot_swap(self, adapter_name: str, which: str, publish: Callable[[LoadedCheckpoint], T]) -> T:
        """Loads a checkpoint and calls `publish` with it, which makes it live. Returns what `publish` returns.

        Raises:
            UnknownModelError, AdapterFileError: see `load_checkpoint`; `publish` is not called.
        """
        return publish(self.load_checkpoint(adapter_name, which))

    # ---- writing ------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        adapter: AdapterRef,
        weights: AdapterWeights,
        step: int | None = None,
        tags: Sequence[str] = (),
        metrics: Mapping[str, float] | None = None,
        extra: Extra | None = None,
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
        tags = [check_tag(tag) for tag in tags]
        numbers = check_metrics(metrics or {})
        with self._lock:
            with _disk(f"a checkpoint of {adapter.name} was not saved"):
                index = self._index_of(adapter.name)
                what = SavedVersion(adapter, check_step(index.next_step() if step is None else step), numbers)
                name = checkpoint_name(what.step)
                with atomic.folder_aside(index.path) as aside:
                    manifest = self._fill(aside, what, weights, extra)
                    index = self._place(aside, index, name, manifest)
            new = index.manifests[name] is manifest
            with _disk(f"{name} of {adapter.name} is saved, but its tags or `latest` may not be"):
                index = self._point(index, name, tags, new)
            return (self._prune(index) if new else index).card(name)

    def tag(self, adapter_name: str, which: str, tag: str) -> CheckpointCard:
        """Gives a checkpoint a tag, and takes it from the one that had it. Tagged checkpoints are not pruned.

        Raises:
            UnknownModelError: there is no such checkpoint.
            InvalidRequestError: the tag is not a plain name.
            StorageError: the disk failed; the tag is unchanged.
        """
        check_tag(tag)
        with self._lock, _disk(f"the tag {tag} of {adapter_name} was not written"):
            index, name = self._named(adapter_name, which)
            return self._write_tags(index, name, [tag]).card(name)

    def set_latest(self, adapter_name: str, which: str) -> CheckpointCard:
        """Makes `latest` mean an older checkpoint, from which training continues.

        Raises:
            UnknownModelError: there is no such checkpoint.
            StorageError: the disk failed; `latest` is unchanged.
        """
        with self._lock, _disk(f"`latest` of {adapter_name} was not written"):
            index, name = self._named(adapter_name, which)
            return self._write_latest(index, name).card(name)

    def forget(self, adapter_name: str) -> None:
        """Forgets the checkpoints of an adapter, whose folder is being removed."""
        with self._lock:
            self._indexes = {name: index for name, index in self._indexes.items() if name != adapter_name}

    def _fill(self, aside: Path, what: SavedVersion, weights: AdapterWeights, extra: Extra | None) -> Manifest:
        """Writes all files into `aside`, the manifest last. Raises AdapterFileError if they cannot be read back."""
        write_mlx_lm(aside, weights, self._layout)
        read_adapter(aside, self._layout, self._max_rank)
        if extra is not None:
            extra(aside)
        return seal(aside, what, weights, self._fingerprint)

    def _place(self, aside: Path, index: CheckpointIndex, name: str, manifest: Manifest) -> CheckpointIndex:
        """Renames `aside` to `name`, unless a checkpoint with the same content is there."""
        there = index.manifests.get(name)
        if there is not None and there.files == manifest.files:
            return index
        if (index.path / name).exists():
            raise ConflictError(
                f"{manifest.adapter} has a {name} with other content: save under another step, or without one"
            )
        os.rename(aside, index.path / name)
        self.saves_total += 1
        return self._set_index(index.adding(name, manifest))

    def _point(self, index: CheckpointIndex, name: str, tags: Sequence[str], new: bool) -> CheckpointIndex:
        """Writes the tags, and `latest` if the checkpoint is new or its save was interrupted before it did so."""
        atomic.sync(index.path)
        index = self._write_tags(index, name, tags)
        latest = index.manifests.get(index.latest or "")
        if not new and latest is not None and latest.order >= index.manifests[name].order:
            return index
        return self._write_latest(index, name)

    def _write_latest(self, index: CheckpointIndex, name: str) -> CheckpointIndex:
        atomic.replace_file(index.path / LATEST, f"{name}\n".encode())
        return self._set_index(replace(index, latest=name))

    def _write_tags(self, index: CheckpointIndex, name: str, tags: Sequence[str]) -> CheckpointIndex:
        changed = {**index.tags, **dict.fromkeys(tags, name)}
        if changed == index.tags:
            return index
        atomic.replace_file(index.path / TAGS, render_tags(changed))
        return self._set_index(replace(index, tags=changed))

    def _prune(self, index: CheckpointIndex) -> CheckpointIndex:
        """Removes surplus checkpoints. Disk errors are only logged, because the save itself has succeeded."""
        for name in index.surplus(self._keep):
            path = index.path / name
            if self.in_use(str(path)):
                continue
            try:
                trash = atomic.hide(path) if path.exists() else None
            except OSError as error:
                _log.warning("%s could not be pruned: %s", path, error.strerror)
                continue
            index = self._set_index(index.without(name))
            if trash is not None:
                atomic.remove(trash)
        return index

    def _index_of(self, adapter_name: str) -> CheckpointIndex:
        """The adapter's index. Makes its folder if needed, and removes what interrupted saves left there."""
        index = self._indexes.get(adapter_name) or CheckpointIndex(self._folder / adapter_name)
        for other in self._indexes:
            if other != adapter_name and other.casefold() == adapter_name.casefold():
                raise ConflictError(f"{adapter_name} and {other} would share a folder on some disks: use another name")
        atomic.make_folder(index.path)
        atomic.sweep(index.path)
        return index

    def _set_index(self, index: CheckpointIndex) -> CheckpointIndex:
        self._indexes = {**self._indexes, index.path.name: index}
        return index

    def _named(self, adapter_name: str, which: str) -> tuple[CheckpointIndex, str]:
        index = self._indexes.get(adapter_name)
        name = index.resolve(which) if index else None
        if index is None or name is None:
            raise UnknownModelError(f"{adapter_name!r} has no checkpoint {which!r}: GET /v1/checkpoints lists them")
        return index, name

    def _check_base(self, what: str, manifest: Manifest) -> None:
        if manifest.base_fingerprint != self._fingerprint:
            raise AdapterFileError(
                f"{what} was made for the base model {manifest.base_fingerprint}, and {self._fingerprint} is served: "
                "serve that model, or name another checkpoint"
            )


@contextmanager
def _disk(outcome: str) -> Iterator[None]:
    """Turns OSError into a StorageError whose message begins with `outcome` and has no paths."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{outcome}: {error.strerror}; make room on the disk and try again") from error


def adapter_in(path: Path) -> Path:
    """The folder of the checkpoint that a path means; the path itself if it means none.

    Raises:
        AdapterFileError: it is a run with several adapters.
    """
    with suppress(OSError):  # what cannot be looked at is for the reader of the files to report
        if path.is_dir():
            return _latest_of(path) or _only_adapter_of(path) or path
        if path.name == LATEST:
            return _latest_of(path.parent) or path
        return _tagged(path) or path
    return path


def _latest_of(adapter: Path) -> Path | None:
    """The checkpoint that `latest` names or, if that one is gone, the one with the highest step."""
    found = {entry.name: entry for entry in adapter.glob("checkpoint-*") if (entry / MANIFEST).is_file()}
    steps = {name: step for name in found if (step := step_of(name)) is not None}
    name = stored_latest(adapter / LATEST)
    return found[name if name in steps else max(steps, key=lambda name: steps[name])] if steps else None


def _only_adapter_of(run: Path) -> Path | None:
    if not is_run(run):
        return None
    adapters = {entry.name: latest for entry in sorted(run.iterdir()) if (latest := _latest_of(entry))}
    if len(adapters) > 1:
        raise AdapterFileError(
            f"{run.name} is a run with several adapters, {', '.join(adapters)}: name one of these folders", "lora_path"
        )
    return next(iter(adapters.values()), None)


def _tagged(path: Path) -> Path | None:
    tags = path.with_name(TAGS)
    if not tags.is_file():
        return None
    try:
        name = TAGS_TYPE.validate_json(tags.read_bytes(), strict=True).get(path.name, "")
    except ValueError:
        return None
    return path.with_name(name) if step_of(name) is not None else None
