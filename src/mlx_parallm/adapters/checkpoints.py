"""Adapter versions on disk: `<folder>/<adapter>/checkpoint-<step>/`, written whole or not at all.

    <adapter>/checkpoint-7/   adapters.safetensors, adapter_config.json, what `extra` wrote, manifest.json
    <adapter>/latest          one line: the name of the newest save, or of the one gone back to since
    <adapter>/tags.json       from tag to checkpoint name

A save fills `.tmp-<random>/`, fsyncs it and renames it; a checkpoint that is pruned is renamed before it is removed.
So a folder of a checkpoint's name is whole at every moment, and a crash costs at most the save that it cut off.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mlx_parallm.adapters import atomic
from mlx_parallm.adapters.files import read_adapter, write_mlx_lm
from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.adapters.manifest import Manifest, Subject, check_metrics, check_step, checkpoint_name, seal, verify
from mlx_parallm.adapters.names import check_name, check_tag
from mlx_parallm.adapters.shelf import LATEST, TAGS, Shelf, read_shelves, render_tags
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import AdapterRef, CheckpointCard
from mlx_parallm.errors import AdapterFileError, ConfigError, ConflictError, StorageError, UnknownModelError

T = TypeVar("T")
Extra = Callable[[Path], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Weights that passed every check. `digest`: `AdapterFile`'s."""

    card: CheckpointCard
    weights: AdapterWeights
    digest: str


class CheckpointManager:
    """Saves, finds, loads and prunes checkpoints. No MLX: weights are numpy's. Safe to call from any thread.

    `in_use`, set by the owner: whether a version is served from the files at a card's `path`, which are then not
    pruned. It is called in the middle of a save and must not save, tag or load. `saves_total` counts new checkpoints.

    Invariant: `find`, `cards` and `newest_version` see frozen shelves and never wait; the lock is for what does IO.
    """

    def __init__(self, folder: Path, layout: AdapterLayout, fingerprint: str, max_rank: int, keep: int = 10) -> None:
        """Reads back what is in `folder` (made where it is missing), whatever state a crash left it in.

        `fingerprint`: of the base model. `keep`: newest checkpoints of each adapter that a save leaves in place.

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
            self._shelves = {shelf.path.name: shelf for shelf in read_shelves(folder)}
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be kept in {folder} ({error.strerror}): give --checkpoint-dir a folder that this "
                "user can write"
            ) from error

    # ---- reading ------------------------------------------------------------------------------------

    def find(self, adapter_name: str, which: str) -> CheckpointCard | None:
        """From memory. `which`: `checkpoint-<step>`, a tag or `latest`."""
        shelf = self._shelves.get(adapter_name)
        name = shelf.resolve(which) if shelf else None
        return shelf.card(name) if shelf and name else None

    def cards(self, adapter_name: str | None = None) -> tuple[CheckpointCard, ...]:
        """Of one adapter or of all, oldest first; from memory."""
        shelves = [shelf for name, shelf in self._shelves.items() if adapter_name in (None, name)]
        cards = [shelf.card(name) for shelf in shelves for name in shelf.manifests]
        return tuple(sorted(cards, key=lambda card: (card.created, card.step, card.adapter.name)))

    def newest_version(self, adapter_name: str) -> int:
        """The largest version of that adapter ever saved, as far as is known; 0 if none."""
        shelf = self._shelves.get(adapter_name)
        return shelf.newest_version if shelf else 0

    def load_checkpoint(self, adapter_name: str, which: str = LATEST) -> LoadedCheckpoint:
        """Reads weights after every checksum and the base model's fingerprint were found right.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: a file is damaged, or of another base model.
        """
        with self._lock:
            shelf, name = self._named(adapter_name, which)
            folder, manifest = shelf.path / name, shelf.manifests[name]
            verify(folder, manifest)
            self._check_base(f"{adapter_name}/{name}", manifest)
            file = read_adapter(folder, self._layout, self._max_rank)
            return LoadedCheckpoint(shelf.card(name), file.weights, file.digest)

    def hot_swap(self, adapter_name: str, which: str, publish: Callable[[LoadedCheckpoint], T]) -> T:
        """Hands a checkpoint to `publish`, which makes it live, once it is loaded; not called if that fails.

        Raises:
            UnknownModelError, AdapterFileError: as `load_checkpoint`.
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
        """Writes a version as checkpoint `step` (None: the next one), then prunes.

        `extra` is called with the folder being filled and may add files (no folders), such as an optimizer's state.
        A step that has the same content already keeps its version and metrics, and gets the tags; nothing is pruned.

        Raises:
            InvalidRequestError: the name, a tag, a metric or the step cannot be stored, or the weights cannot be
                loaded back (AdapterFileError).
            ConflictError: there is a checkpoint of that step with other content.
            StorageError: the disk failed; checkpoints saved before are untouched.
        """
        check_name(adapter.name)
        tags = [check_tag(tag) for tag in tags]
        numbers = check_metrics(metrics or {})
        with self._lock:
            with _disk(f"a checkpoint of {adapter.name} was not saved"):
                shelf = self._shelf(adapter.name)
                what = Subject(adapter, check_step(shelf.next_step() if step is None else step), numbers)
                name = checkpoint_name(what.step)
                with atomic.folder_aside(shelf.path) as aside:
                    manifest = self._fill(aside, what, weights, extra)
                    shelf = self._place(aside, shelf, name, manifest)
            new = shelf.manifests[name] is manifest
            with _disk(f"{name} of {adapter.name} is saved, but its tags or `latest` may not be"):
                shelf = self._point(shelf, name, tags, new)
            return (self._prune(shelf) if new else shelf).card(name)

    def tag(self, adapter_name: str, which: str, tag: str) -> CheckpointCard:
        """Gives a checkpoint a tag, taking it from the one that had it. Tagged checkpoints are not pruned.

        Raises:
            UnknownModelError: there is no such checkpoint.
            InvalidRequestError: the tag is not a plain name.
            StorageError: the disk failed; the tag is where it was.
        """
        check_tag(tag)
        with self._lock, _disk(f"the tag {tag} of {adapter_name} was not written"):
            shelf, name = self._named(adapter_name, which)
            return self._write_tags(shelf, name, [tag]).card(name)

    def set_latest(self, adapter_name: str, which: str) -> CheckpointCard:
        """Makes `latest` mean an older checkpoint: the one that is gone on from.

        Raises:
            UnknownModelError: there is no such checkpoint.
            StorageError: the disk failed; `latest` is where it was.
        """
        with self._lock, _disk(f"`latest` of {adapter_name} was not written"):
            shelf, name = self._named(adapter_name, which)
            return self._write_latest(shelf, name).card(name)

    def _fill(self, aside: Path, what: Subject, weights: AdapterWeights, extra: Extra | None) -> Manifest:
        """Writes everything into `aside`, the manifest last; nothing that could not be loaded back passes."""
        write_mlx_lm(aside, weights, self._layout)
        read_adapter(aside, self._layout, self._max_rank)
        if extra is not None:
            extra(aside)
        return seal(aside, what, weights, self._fingerprint)

    def _place(self, aside: Path, shelf: Shelf, name: str, manifest: Manifest) -> Shelf:
        """Renames `aside` to `name`, unless the same content is there."""
        there = shelf.manifests.get(name)
        if there is not None and there.files == manifest.files:
            return shelf
        if (shelf.path / name).exists():
            raise ConflictError(
                f"{manifest.adapter} has a {name} with other content: save under another step, or without one"
            )
        os.rename(aside, shelf.path / name)
        self.saves_total += 1
        return self._keep_shelf(shelf.adding(name, manifest))

    def _point(self, shelf: Shelf, name: str, tags: Sequence[str], new: bool) -> Shelf:
        """Makes tags and, for a new save or one that a crash cut off here, `latest` lead to `name`."""
        atomic.sync(shelf.path)
        shelf = self._write_tags(shelf, name, tags)
        latest = shelf.manifests.get(shelf.latest or "")
        if not new and latest is not None and latest.order >= shelf.manifests[name].order:
            return shelf
        return self._write_latest(shelf, name)

    def _write_latest(self, shelf: Shelf, name: str) -> Shelf:
        atomic.replace_file(shelf.path / LATEST, f"{name}\n".encode())
        return self._keep_shelf(replace(shelf, latest=name))

    def _write_tags(self, shelf: Shelf, name: str, tags: Sequence[str]) -> Shelf:
        changed = {**shelf.tags, **dict.fromkeys(tags, name)}
        if changed == shelf.tags:
            return shelf
        atomic.replace_file(shelf.path / TAGS, render_tags(changed))
        return self._keep_shelf(replace(shelf, tags=changed))

    def _prune(self, shelf: Shelf) -> Shelf:
        """The disk's refusal is logged: the save itself has succeeded."""
        for name in shelf.surplus(self._keep):
            path = shelf.path / name
            if self.in_use(str(path)):
                continue
            try:
                trash = atomic.hide(path) if path.exists() else None
            except OSError as error:
                _log.warning("%s could not be pruned: %s", path, error.strerror)
                continue
            shelf = self._keep_shelf(shelf.without(name))
            if trash is not None:
                atomic.remove(trash)
        return shelf

    def _shelf(self, adapter_name: str) -> Shelf:
        """The adapter's shelf, its folder made where it is missing and swept of what could not be removed before."""
        shelf = self._shelves.get(adapter_name) or Shelf(self._folder / adapter_name)
        for other in self._shelves:
            if other != adapter_name and other.casefold() == adapter_name.casefold():
                raise ConflictError(f"{adapter_name} and {other} would share a folder on some disks: use another name")
        atomic.make_folder(shelf.path)
        atomic.sweep(shelf.path)
        return shelf

    def _keep_shelf(self, shelf: Shelf) -> Shelf:
        self._shelves = {**self._shelves, shelf.path.name: shelf}
        return shelf

    def _named(self, adapter_name: str, which: str) -> tuple[Shelf, str]:
        shelf = self._shelves.get(adapter_name)
        name = shelf.resolve(which) if shelf else None
        if shelf is None or name is None:
            raise UnknownModelError(f"{adapter_name!r} has no checkpoint {which!r}: GET /v1/checkpoints lists them")
        return shelf, name

    def _check_base(self, what: str, manifest: Manifest) -> None:
        if manifest.base_fingerprint != self._fingerprint:
            raise AdapterFileError(
                f"{what} was made for the base model {manifest.base_fingerprint}, and {self._fingerprint} is served: "
                "serve that model, or name another checkpoint"
            )


@contextmanager
def _disk(outcome: str) -> Iterator[None]:
    """Turns the disk's refusals into a StorageError that begins with `outcome`; paths are left out."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{outcome}: {error.strerror}; make room on the disk and try again") from error
