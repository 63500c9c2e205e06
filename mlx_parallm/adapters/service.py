"""AdapterService: loads, publishes, routes and saves adapters from the event loop.

Files are read on worker threads, by the `AdapterLibrary`, and arrays are used on the device thread only:

load ─▶ read and check (worker) ─▶ add the version (registry) ─▶ stage it (device, between steps) ─▶ make it live
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mlx_parallm.adapters.cards import AdapterCard, AdapterStats, CheckpointCard, Residence
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.files import AdapterFile, AdapterRoots, read_adapter, read_config
from mlx_parallm.adapters.formats import CONFIG_FILE, FormatName, is_scorer, write_adapter
from mlx_parallm.adapters.registry import AdapterRegistry, Split
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.runs import KeptVersions, adapter_in
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair, Version, VersionInfo
from mlx_parallm.atomic import new_folder, reason_of
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef, check_name, name_and_step
from mlx_parallm.core.device import DeviceThread
from mlx_parallm.errors import (
    AdapterFileError,
    ConflictError,
    InvalidRequestError,
    ParaLLMError,
    StorageError,
    UnknownModelError,
)

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
            raise StorageError(f"{folder.name} of {folder.parent.name} was not written: {reason_of(error)}") from error
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

    def newest_save(self, adapter: str) -> str:
        """The name of the newest checkpoint of an adapter; empty if there is none."""
        cards = self.checkpoints.cards(adapter) if self.checkpoints else ()
        return cards[-1].name if cards else ""

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


class AdapterService:
    """Implements `core.AdapterClient`. It is used on the event loop's thread only, except for `publish_trained`.

    Args:
        store: its statistics are read on the event loop; all else that it does runs on the device thread.
        reserved: names that no adapter may have, such as the model's own.
        default_folder: the folder of the adapter for requests that name none.
    """

    def __init__(
        self,
        device: DeviceThread,
        store: AdapterStore,
        library: AdapterLibrary,
        reserved: frozenset[str] = frozenset(),
        default_folder: Path | None = None,
    ) -> None:
        self._device = device
        self._store = store
        self._registry: AdapterRegistry = store.registry
        self._library = library
        self._reserved = reserved
        self._default_folder = default_folder
        self._publishing = asyncio.Lock()
        self._loading_folder = asyncio.Lock()
        self._folders: dict[Path, tuple[FolderStamp, str]] = {}  # folders that requests named: stamp and adapter's name
        self._held: dict[AdapterRef, ExitStack] = {}

    def attach(self, store: AdapterStore) -> None:
        """Uses the store of a base model that was loaded again. Its registry is the same."""
        assert store.registry is self._registry
        self._store = store

    # -- selectors -------------------------------------------------------------------------------

    @contextmanager
    def lease(self, selector: str | None, key: str | None = None) -> Iterator[AdapterRef]:
        """See `core.AdapterClient.lease`."""
        with self._registry.lease(selector, key) as version:
            yield version.ref

    def find(self, selector: str) -> AdapterCard:
        version = self._registry.find(selector)
        if version.ref == BASE_ADAPTER:
            raise UnknownModelError(f"{selector!r} is the base model, not an adapter.")
        return self._card(version)

    def live(self, name: str) -> AdapterRef | None:
        """The live version of a name."""
        version = self._registry.live(name)
        return version.ref if version else None

    def cards(self) -> tuple[AdapterCard, ...]:
        return tuple(map(self._card, self._registry.versions()))

    def route(self) -> Mapping[str, float]:
        return self._registry.route()

    def stats(self) -> AdapterStats:
        """See `core.AdapterClient.stats`."""
        store, registry, checkpoints = self._store, self._registry, self._library.checkpoints
        running, waiting = store.names()
        return AdapterStats(
            slots=store.bank.slots,
            max_rank=store.bank.max_rank,
            slots_used=store.slots_used,
            slots_pinned=store.pinned,
            bank_bytes=store.bytes_held,
            copies=store.copies,
            running=running,
            waiting=waiting,
            swaps_total=registry.swaps,
            route_changed=registry.route_changed,
            staged_total=store.staged_total,
            evicted_total=store.evicted_total,
            checkpoint_saves_total=checkpoints.saves_total if checkpoints else 0,
            flip_s_last=registry.flip_s_last,
            flip_s_max=registry.flip_s_max,
            stage_s_last=store.stage_seconds,
        )

    def _card(self, version: Version) -> AdapterCard:
        info = version.info
        return AdapterCard(
            ref=version.ref,
            live=self._registry.live(version.ref.name) is version,
            residence=self._store.residence(version),
            root=info.root,
            rank=info.rank,
            alpha=info.alpha,
            targets=info.targets,
            bytes=info.nbytes,
            created=version.created,
            leases=self._store.requests(version.ref),
            checkpoint=info.checkpoint,
            warning=info.warning,
            digest=info.digest,
        )

    # -- loading and publishing ------------------------------------------------------------------

    async def load(self, name: str, path: str, replace: bool, base: str | None = None) -> AdapterCard:
        """See `core.AdapterClient.load`. All are for one base model, so `base` is not read."""
        adapter, _ = name_and_step(name)
        if adapter in self._reserved:
            raise InvalidRequestError(f"lora_name: {adapter!r} is the model's own name: choose another", "lora_name")
        return await self._load_file(name, await asyncio.to_thread(self._library.read, path), replace)

    async def _load_file(self, name: str, file: AdapterFile, replace: bool) -> AdapterCard:
        adapter, number = name_and_step(name)
        async with self._publishing:
            live, known = self._registry.live(adapter), self._existing(adapter, number)
            if known is not None and not replace:
                raise InvalidRequestError(
                    f"{name!r} is loaded already; load_inplace true replaces it.", param="lora_name"
                )
            loaded = await self._published(adapter, file.weights, file.info, number)
            if loaded is known and loaded is not live:
                await self.flip(loaded.ref)
            if loaded is not live:
                await self._keep_live(adapter)
        return self._card(loaded)

    async def keep_live(self, adapter: str) -> None:
        """Has a restart serve the live version of an adapter, which training continues from, wherever it was loaded
        from. An error is only logged."""
        async with self._publishing:
            await self._keep_live(adapter, wherever=True)

    async def _keep_live(self, adapter: str, wherever: bool = False) -> None:
        """Has a restart serve the version that a load or a rollback has made live, and keep the one before it. An error
        is only logged, because the version is live. `wherever`: also if the restart would find no version."""
        found, kept = self._library.found_by_start(adapter, self._registry.versions()), self._library.kept
        live = [version for version in self._registry.last_live(adapter) if self._available(version)]
        numbers = [version.ref.version for version in live]
        if not live or (found is None and not wherever):
            return
        if not kept and found not in (None, numbers[-1]):
            warning = (
                "%s is live until the server ends: a restart serves %s@%d. With --checkpoint-dir, what is live is kept"
            )
            _log.warning(warning, live[-1].ref, adapter, found)
        try:
            for version in live:
                if version.ref.version != found and not version.info.checkpoint:
                    await self._keep_copy(version)
            saved, known = self._library.newest_save(adapter), self._registry.numbers(adapter)
            await asyncio.to_thread(kept.set_live, adapter, numbers, found, saved, known)
        except ParaLLMError as error:
            _log.error("a restart may not serve what is live as %s: %s", adapter, error)

    async def _keep_copy(self, version: Version) -> None:
        """Writes a version into the folder of the run, unless it is there."""
        folder = self._library.kept.copy_of(version.ref)
        if folder is not None and version.info.root != str(folder):
            weights = await self.weights(version)
            digest = await asyncio.to_thread(self._library.write_copy, weights, folder)
            self._registry.set_files(version, root=str(folder), digest=digest)

    async def load_folder(self, path: str) -> str:
        """See `core.AdapterClient.load_folder`."""
        folder, stamp = await asyncio.to_thread(self._stamped, path)
        if name := self._unchanged(folder, stamp):
            return name
        async with self._loading_folder:  # requests that name the folder meanwhile wait, and read no file
            if name := self._unchanged(folder, stamp):
                return name
            file = await asyncio.to_thread(self._library.read, str(folder))
            if (name := self._live_from(folder, file.info.digest)) is None:
                name = (await self._load_file(name_of_folder(folder), file, replace=True)).ref.name
            self._folders[folder] = (stamp, name)
            return name

    def _stamped(self, path: str) -> tuple[Path, FolderStamp]:
        folder = self._library.roots.resolve(path)
        return folder, stamp_of(folder)

    def _unchanged(self, folder: Path, stamp: FolderStamp) -> str | None:
        """The name of the adapter of a folder that was loaded with this stamp, if the name is still live with it."""
        known, name = self._folders.get(folder, (None, ""))
        live = self._registry.live(name)
        return name if known == stamp and live is not None and live.info.root == str(folder) else None

    def _live_from(self, folder: Path, digest: str | None = None) -> str | None:
        """The name of the adapter whose live version came from this folder. `digest`: with this content; None: any."""
        live = (self._registry.live(name) for name in {version.ref.name for version in self._registry.versions()})
        found = (v for v in live if v and v.info.root == str(folder) and digest in (None, v.info.digest))
        return next((version.ref.name for version in found), None)

    async def loaded_folder(self, path: str) -> str | None:
        """See `core.AdapterClient.loaded_folder`."""
        try:
            folder = await asyncio.to_thread(self._library.roots.resolve, path)
        except InvalidRequestError:
            return None
        return self._live_from(folder)

    @property
    def has_default_folder(self) -> bool:
        return self._default_folder is not None

    async def default_name(self) -> str | None:
        """See `core.AdapterClient.default_name`."""
        if self._default_folder is None:
            return None
        folder = await asyncio.to_thread(adapter_in, self._default_folder)
        return await self.load_folder(str(folder.absolute())) if has_adapter(folder) else None

    async def publish_folder(self, name: str, folder: Path) -> AdapterRef:
        """Publishes the adapter in a folder that this program itself names, so it may lie anywhere. The version does
        not depend on the folder afterwards. If the live version has the same content, no new version is made.

        Raises:
            AdapterFileError: its files cannot be used.
        """
        file = await asyncio.to_thread(self._library.read_anywhere, folder)
        async with self._publishing:
            return (await self._published(name, file.weights, replace(file.info, root=""))).ref

    async def hold(self, ref: AdapterRef, folder: Path) -> None:
        """Adds the adapter in a folder that this program itself names as this version, and stages it. It does not go
        live, and does not depend on the folder afterwards: it stays in memory until `release`. Doing so again changes
        nothing.

        Raises:
            AdapterFileError: its files cannot be used.
            ConflictError: the name has had a version of this number with other content, or one of a higher number.
        """
        file = await asyncio.to_thread(self._library.read_anywhere, folder)
        async with self._publishing:
            await self._published(ref.name, file.weights, replace(file.info, root=""), ref.version, goes_live=False)
            if ref not in self._held:
                self._held[ref] = ExitStack()
                self._held[ref].enter_context(self._registry.lease(str(ref)))

    def release(self, ref: AdapterRef) -> None:
        """Forgets a version that is held, once no request uses it."""
        self._registry.discard(ref)
        if (lease := self._held.pop(ref, None)) is not None:
            lease.close()

    def _existing(self, name: str, number: int | None) -> Version | None:
        """The version of this number; None: the live one."""
        return self._registry.live(name) if number is None else self._registry.known(AdapterRef(name, number))

    async def _published(
        self,
        name: str,
        weights: AdapterWeights,
        info: VersionInfo,
        number: int | None = None,
        goes_live: bool = True,
    ) -> Version:
        """The existing version if it has this content, else a new one; see `publish`."""
        known = self._existing(name, number)
        if known is not None and known.info.digest == info.digest:
            return known
        return await self.publish(name, weights, info, goes_live, number)

    async def publish(
        self,
        name: str,
        weights: AdapterWeights,
        info: VersionInfo,
        goes_live: bool = True,
        number: int | None = None,
    ) -> Version:
        """Adds a version of `name`, stages it between decode steps and makes it live. If that fails or is cancelled,
        the version is forgotten. A version from a folder has its number on the disk before a request can use it.

        Args:
            goes_live: if it is false, only `name@version` selects the version.
            number: see `AdapterRegistry.add`.
        """
        version = self._registry.add(name, info, number)
        try:
            if info.root:
                await asyncio.to_thread(self._library.kept.number, version.ref, info.digest)
            await self._device.run(lambda: self._store.stage(version, weights, goes_live=goes_live))
        except BaseException:  # a cancelled caller too: nobody would ever name or unload the version
            self._registry.discard(version.ref)
            raise
        return version

    async def flip(self, ref: AdapterRef) -> None:
        """Makes a version live, after staging it if it is in no slot.

        Raises:
            UnknownModelError: it was unloaded.
        """
        version = self._registry.version(ref)
        if version is None:
            raise UnknownModelError(f"{ref} was unloaded; it cannot go live any more.")
        await self._device.run(lambda: self._store.stage(version, goes_live=True))

    def publish_trained(
        self,
        name: str,
        weights: AdapterWeights,
        info: VersionInfo,
        on_added: Callable[[AdapterRef], None],
        goes_live: bool = True,
    ) -> Future[AdapterRef]:
        """Does what `publish` does, but is called on the device thread. The future is completed there too, because each
        trip to the event loop would delay the version by some decode steps. The version is staged before all others.

        Args:
            weights: MLX arrays.
            on_added: called with the version before any request can use it.
        """
        version = self._registry.add(name, info)
        on_added(version.ref)
        staged = self._store.stage(version, weights, urgent=True, goes_live=goes_live)
        staged.add_done_callback(lambda done: self._registry.discard(version.ref) if done.exception() else None)
        return staged

    def number_from(self, name: str, least: int) -> None:
        """See `AdapterRegistry.number_from`."""
        self._registry.number_from(name, least)

    def discard(self, ref: AdapterRef) -> None:
        """See `AdapterRegistry.discard`."""
        self._registry.discard(ref)

    async def remove(self, refs: Sequence[AdapterRef]) -> None:
        """Discards versions, and removes the copies of them in the run. Raises OSError."""
        for ref in refs:
            self._registry.discard(ref)
        await asyncio.to_thread(self._library.kept.remove, refs)

    # -- unloading, routes and rollbacks ---------------------------------------------------------

    async def unload(self, selector: str, base: str | None = None) -> tuple[AdapterRef, ...]:
        """See `core.AdapterClient.unload`. All are for one base model, so `base` is not read."""
        return tuple(version.ref for version in self._registry.unload(selector))

    async def set_route(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """See `core.AdapterClient.set_route`."""
        total = sum(weights.values())
        if not total > 0:
            raise InvalidRequestError("At least one weight must be above 0.", param="weights")
        shares = {selector: weight / total for selector, weight in weights.items() if weight > 0}
        async with self._publishing:
            for selector in shares:
                await self._device.run(partial(self._store.stage, self._registry.find(selector)))
            self._registry.set_route(shares)
        return self._registry.route()

    def split(self, name: str, choose: Split | None) -> None:
        """See `AdapterRegistry.split`."""
        self._registry.split(name, choose)

    async def stage(self, ref: AdapterRef) -> None:
        """Copies a version into a slot. Raises AdapterUnavailableError if its weights cannot be read."""
        await self._device.run(partial(self._store.stage, self._registry.find(str(ref))))

    async def rollback(self, name: str | None) -> tuple[AdapterRef, Mapping[str, float]]:
        """See `core.AdapterClient.rollback`. Takes effect at once; the version is staged when a request needs it."""
        if name is None:
            route = self._registry.rollback_route()
            heaviest = max(route, key=lambda selector: route[selector])
            return self._registry.find(heaviest).ref, route
        async with self._publishing:
            version = self._registry.rollback(name, self._available)
            await self._keep_live(name)
        return version.ref, self._registry.route()

    def _available(self, version: Version) -> bool:
        return version.readable or self._store.residence(version) is not Residence.FILE

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoints(self) -> tuple[CheckpointCard, ...]:
        return self._library.checkpoints.cards() if self._library.checkpoints else ()

    async def save_checkpoint(
        self, selector: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """See `core.AdapterClient.save_checkpoint`."""
        if (checkpoints := self._library.checkpoints) is None:
            raise InvalidRequestError("This server keeps no checkpoints; start it with --checkpoint-dir.")
        with self._registry.lease(selector or self._registry.default_adapter) as version:
            if version.ref == BASE_ADAPTER:
                raise InvalidRequestError("The base model is no adapter; name one to save.", param="lora_name")
            weights = await self.weights(version)
            save = partial(checkpoints.save_checkpoint, version.ref, weights, step, tags, metrics)
            card = await asyncio.to_thread(save)
            self._registry.set_files(version, root=card.path, checkpoint=card.name)
            return card

    async def weights(self, version: Version) -> AdapterWeights:
        """A version's weights as they were published, as float32 NumPy arrays. They come from its files if it has any
        and these are not superseded, else from memory.

        Raises:
            AdapterFileError, UnknownModelError: the files are gone, damaged or changed.
            ConflictError: they are in no file and not in memory.
        """
        if version.readable:
            return await asyncio.to_thread(self._library.read_again, version)
        weights = await self._device.run(lambda: self._store.extract(version))
        if weights is None:
            raise ConflictError(f"the weights of {version.ref} are in no file and not in memory any more")
        return weights

    async def write(self, ref: AdapterRef, folder: Path, form: FormatName) -> None:
        """Writes the files of a version into `folder`, which appears whole or not at all.

        Raises:
            UnknownModelError: the version was unloaded.
            Also the errors of `weights`.
        """
        with self._registry.lease(str(ref)) as version:
            weights = await self.weights(version)
            await asyncio.to_thread(self._library.write, weights, folder, form)

    async def write_neutral(self, folder: Path, form: FormatName, rank: int, targets: Sequence[str]) -> None:
        """Writes the files of an adapter that changes nothing, of this rank, for the linears with these names, without
        the head."""
        layout = self._library.layout
        specs = [spec for spec in layout.named(targets) if spec is not layout.head]
        zeros = partial(np.zeros, dtype=np.float32)
        pairs = {spec.path: LoRAPair(zeros(spec.a_shape(rank)), zeros(spec.b_shape(rank)), 1.0) for spec in specs}
        await asyncio.to_thread(self._library.write, AdapterWeights(pairs), folder, form)
