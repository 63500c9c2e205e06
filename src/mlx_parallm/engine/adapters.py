"""AdapterService: the asyncio face of the adapters. Files in worker threads, arrays on the device thread.

load ─▶ read and check (worker) ─▶ add version (books) ─▶ stage (device, beside traffic) ─▶ flip ─▶ answer
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from mlx_parallm.adapters.books import AdapterBooks
from mlx_parallm.adapters.checkpoints import CheckpointManager
from mlx_parallm.adapters.library import AdapterLibrary, info_of_file
from mlx_parallm.adapters.names import check_name
from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.adapters.versions import Version, VersionInfo
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import (
    BASE_ADAPTER,
    AdapterCard,
    AdapterRef,
    AdapterStats,
    CheckpointCard,
    Residence,
)
from mlx_parallm.engine.processor import ContinuousBatchProcessor
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownModelError


class AdapterService:
    """Implements `core.AdapterClient`.

    Args:
        store: the device thread's; only handed to it through `processor`, its figures apart.
        reserved: names that no adapter may have, such as the model's own.
    """

    def __init__(
        self,
        processor: ContinuousBatchProcessor,
        store: AdapterStore,
        library: AdapterLibrary,
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        self._processor = processor
        self._store = store
        self._books: AdapterBooks = store.books
        self._library = library
        self._reserved = reserved
        self._publishing = asyncio.Lock()
        self._flip_s_last = self._flip_s_max = 0.0

    # -- what selectors mean ---------------------------------------------------------------------

    @contextmanager
    def lease(self, selector: str | None) -> Iterator[AdapterRef]:
        """See `core.AdapterClient.lease`."""
        with self._books.lease(selector) as version:
            yield version.ref

    def find(self, selector: str) -> AdapterCard:
        version = self._books.find(selector)
        if version.ref == BASE_ADAPTER:
            raise UnknownModelError(f"{selector!r} is the base model, not an adapter.")
        return self._card(version)

    def cards(self) -> tuple[AdapterCard, ...]:
        return tuple(map(self._card, self._books.versions()))

    def route(self) -> Mapping[str, float]:
        return self._books.route()

    # -- changes ---------------------------------------------------------------------------------

    async def load(self, name: str, path: str, replace: bool) -> AdapterCard:
        """See `core.AdapterClient.load`."""
        self._check_new(name)
        file = await asyncio.to_thread(self._library.read, path)
        async with self._publishing:
            live = self._books.live(name)
            if live is not None and not replace:
                raise InvalidRequestError(
                    f"{name!r} is loaded already; send load_inplace true to replace it.", param="lora_name"
                )
            if live is None or live.info.digest != file.digest:
                live = await self.publish(name, info_of_file(file), file.weights)
        return self._card(live)

    async def publish(self, name: str, info: VersionInfo, weights: AdapterWeights) -> Version:
        """A new version of `name`: staged beside traffic, then flipped to on the device thread."""
        version = self._books.add(name, info)
        await self._brought(version, weights, lambda: self._books.flip(version.ref))
        return version

    async def bring(
        self, name: str, info: VersionInfo, weights: AdapterWeights, told: Callable[[AdapterRef], None]
    ) -> Version:
        """A version that was just trained, staged before any other: it can be asked for by `name@version`. `told` is
        told its name before anybody can ask for it."""
        version = self._books.add(name, info)
        told(version.ref)
        await self._brought(version, weights, urgent=True)
        return version

    def publish_here(
        self,
        name: str,
        info: VersionInfo,
        weights: AdapterWeights,
        told: Callable[[AdapterRef], None],
        then: Callable[[], None],
        tell: Callable[[AdapterRef | Exception], None],
    ) -> None:
        """`bring` and `flip` for a caller on the device thread. `then` is run right after the flip; `tell` is told when
        the version is live, or what went wrong."""
        version = self._books.add(name, info)
        told(version.ref)

        def flip() -> None:
            self._books.flip(version.ref)
            then()

        def staged(error: Exception | None) -> None:
            error = error or self._flip(flip)
            if error is not None:
                self._books.discard(version.ref)
            tell(error or version.ref)

        self._store.stage(version, weights, staged, urgent=True)

    async def flip(self, version: Version) -> None:
        """Makes the name mean a version that is staged, or is staged first.

        Raises:
            UnknownModelError: it was unloaded meanwhile.
        """
        await self._staged(version, None, then=lambda: self._books.flip(version.ref))

    async def _brought(
        self, version: Version, weights: AdapterWeights, then: Callable[[], None] = lambda: None, urgent: bool = False
    ) -> None:
        try:
            await self._staged(version, weights, then, urgent)
        except BaseException:  # cancelled or failed: it never went live
            if self._books.live(version.ref.name) is not version:
                self._books.discard(version.ref)
            raise

    async def unload(self, selector: str) -> tuple[AdapterRef, ...]:
        gone = self._books.unload(selector)
        return tuple(version.ref for version in gone)

    async def set_route(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        shares, versions = self._books.check_route(weights)
        async with self._publishing:
            for version in versions[:-1]:
                await self._staged(version, None)
            await self._staged(versions[-1], None, then=lambda: self._books.set_route(shares))
        return self._books.route()

    async def rollback(self, name: str | None) -> tuple[AdapterRef, Mapping[str, float]]:
        """See `core.AdapterClient.rollback`. Takes effect at once; the version is staged when it is asked for."""
        if name is None:
            route = self._books.rollback_route()
            heaviest = max(route, key=lambda selector: route[selector])
            return self._books.find(heaviest).ref, route
        version = self._books.rollback(name, self._available)
        return version.ref, self._books.route()

    def _check_new(self, name: str) -> None:
        if check_name(name) in self._reserved:
            raise InvalidRequestError(f"lora_name: {name!r} is the model's own name: choose another", "lora_name")

    def _available(self, version: Version) -> bool:
        return version.readable or self._store.residence(version) is not Residence.FILE

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoints(self) -> tuple[CheckpointCard, ...]:
        return self._library.checkpoints.cards() if self._library.checkpoints else ()

    async def save_checkpoint(
        self, selector: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """See `core.AdapterClient.save_checkpoint`."""
        manager = self._checkpoint_manager()
        with self._books.lease(selector or self._books.default_adapter) as version:
            if version.ref == BASE_ADAPTER:
                raise InvalidRequestError("The base model is no adapter; name one to save.", param="lora_name")
            weights = await self.weights(version)
            save = partial(manager.save_checkpoint, version.ref, weights, step, tags, metrics)
            card = await asyncio.to_thread(save)
            self._books.saved(version, card.path, card.name)
            return card

    def _checkpoint_manager(self) -> CheckpointManager:
        if self._library.checkpoints is None:
            raise InvalidRequestError("This server keeps no checkpoints; start it with --checkpoint-dir.")
        return self._library.checkpoints

    async def weights(self, version: Version) -> AdapterWeights:
        """As they were published: from the files where they are unchanged, else from memory."""
        if version.readable:
            return await asyncio.to_thread(self._library.read_again, version)
        extracted: AdapterWeights | Exception | None
        extracted = await self._processor.on_device(partial(self._store.extract, version))
        if isinstance(extracted, Exception):
            raise extracted
        if extracted is None:
            raise ConflictError(f"the weights of {version.ref} are in no file and not in memory any more")
        return extracted

    # -- the device thread -----------------------------------------------------------------------

    async def _staged(
        self,
        version: Version,
        weights: AdapterWeights | None,
        then: Callable[[], None] = lambda: None,
        urgent: bool = False,
    ) -> None:
        """Waits until the version is staged, and `then` has run: right after the last unit, on the device thread."""

        def start(tell: Callable[[Exception | None], None]) -> None:
            self._store.stage(version, weights, lambda error: tell(error or self._flip(then)), urgent)

        error: Exception | None = await self._processor.on_device(start)
        if error is not None:
            raise error

    def _flip(self, then: Callable[[], None]) -> Exception | None:
        started = time.perf_counter()
        try:
            then()
        except Exception as error:  # noqa: BLE001 - a name unloaded meanwhile: whoever asked for the flip is told
            return error
        self._flip_s_last = time.perf_counter() - started
        self._flip_s_max = max(self._flip_s_max, self._flip_s_last)
        return None

    # -- figures ---------------------------------------------------------------------------------

    def _card(self, version: Version) -> AdapterCard:
        info, name = version.info, version.ref.name
        return AdapterCard(
            ref=version.ref,
            live=self._books.live(name) is version,
            residence=self._store.residence(version),
            root=info.root,
            rank=info.rank,
            alpha=info.alpha,
            targets=info.targets,
            bytes=info.nbytes,
            created=version.created,
            leases=version.leases,
            checkpoint=info.checkpoint,
        )

    def stats(self) -> AdapterStats:
        store, checkpoints = self._store, self._library.checkpoints
        running, waiting = store.names()
        return AdapterStats(
            slots=store.bank.slots,
            slots_used=len(store.slots),
            slots_pinned=store.slots.pinned,
            bank_bytes=store.bytes_held,
            copies=len(store.copies),
            running=running,
            waiting=waiting,
            swaps_total=self._books.swaps,
            staged_total=store.moves.staged,
            evicted_total=store.moves.evicted,
            checkpoint_saves_total=checkpoints.saves_total if checkpoints else 0,
            flip_s_last=self._flip_s_last,
            flip_s_max=self._flip_s_max,
            stage_s_last=store.moves.stage_seconds,
        )
