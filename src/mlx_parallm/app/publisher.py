"""What the training loop asks of the running server's adapters: new versions out, checkpoints in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mlx_parallm.adapters.books import AdapterBooks
from mlx_parallm.adapters.checkpoints import CheckpointManager
from mlx_parallm.adapters.library import info_of_checkpoint
from mlx_parallm.adapters.versions import Version, VersionInfo
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard
from mlx_parallm.engine.adapters import AdapterService
from mlx_parallm.errors import ConflictError, UnknownModelError
from mlx_parallm.rl.learner import DeviceLearner
from mlx_parallm.rl.parts import Publish, Published
from mlx_parallm.rl.samples import UpdateOutcome
from mlx_parallm.rl.snapshot import PolicySnapshot

_TO_BASE = {BASE_ADAPTER.name: 1.0}


class AdapterPublisher:
    """Implements `rl.parts.Publisher`. Event loop's thread only, but for what `at_once` returns.

    Args:
        books: of `service`.
        checkpoints: of the run.
    """

    def __init__(
        self,
        service: AdapterService,
        books: AdapterBooks,
        learner: DeviceLearner,
        checkpoints: CheckpointManager,
    ) -> None:
        self._service = service
        self._books = books
        self._learner = learner
        self._checkpoints = checkpoints

    def live(self, name: str) -> AdapterRef | None:
        version = self._books.live(name)
        return version.ref if version else None

    def at_once(
        self, name: str, agreed: Callable[[UpdateOutcome], bool], told: Callable[[AdapterRef], None]
    ) -> Publish:
        """See `rl.parts.Publisher.at_once`."""
        first = self._is_first(name)

        def flipped() -> None:
            if first:
                self.serve_default()

        def publish(outcome: UpdateOutcome, weights: AdapterWeights, tell: Callable[[Published], None]) -> None:
            if agreed(outcome):
                self._service.publish_here(name, _info(weights), weights, told, flipped, tell)
            else:
                tell(None)

        return publish

    async def stage(self, name: str, told: Callable[[AdapterRef], None]) -> AdapterRef:
        """See `rl.parts.Publisher.stage`. The weights never leave the device."""
        weights = await self._learner.weights(name)
        return (await self._service.bring(name, _info(weights), weights, told)).ref

    async def flip(self, ref: AdapterRef) -> None:
        """See `rl.parts.Publisher.flip`."""
        first = self._is_first(ref.name)
        await self._service.flip(self._version(ref))
        if first:
            self.serve_default()

    def _is_first(self, name: str) -> bool:
        """The default adapter's first live version takes over the base's requests; later ones leave routes alone."""
        return self._books.live(name) is None and name == self._books.default_adapter

    def serve_default(self) -> None:
        """Sends requests that name no adapter to the default one, if it is live and they go to the base."""
        name = self._books.default_adapter
        if self._books.live(name) is not None and dict(self._books.route()) == _TO_BASE:
            self._books.set_route({name: 1.0})

    def discard(self, ref: AdapterRef) -> None:
        self._books.discard(ref)

    @contextmanager
    def keep(self, ref: AdapterRef) -> Iterator[None]:
        with self._books.lease(str(ref)):
            yield

    async def weights(self, name: str) -> tuple[AdapterRef, AdapterWeights]:
        """What the name means now, as it was published, numpy's. Raises UnknownModelError: nothing has that name."""
        with self._books.lease(name) as version:
            return version.ref, await self._service.weights(version)

    # -- checkpoints -----------------------------------------------------------------------------

    async def save(
        self,
        ref: AdapterRef,
        policy: PolicySnapshot,
        tags: Sequence[str],
        metrics: Mapping[str, float],
        step: int | None = None,
    ) -> CheckpointCard:
        """See `rl.parts.Publisher.save`. After a rollback the policy's step may be taken: then the next free one is."""
        write = self._checkpoints.save_checkpoint
        save = partial(write, ref, policy.weights, tags=tags, metrics=metrics, extra=policy.save)
        try:
            card = await asyncio.to_thread(save, step=policy.step if step is None else step)
        except ConflictError:
            if step is not None:
                raise
            card = await asyncio.to_thread(save)
        if version := self._books.version(ref):
            self._books.saved(version, card.path, card.name)
        return card

    def checkpoints(self, name: str) -> tuple[CheckpointCard, ...]:
        return self._checkpoints.cards(name)

    async def go_on_from(self, name: str, checkpoint: str) -> None:
        """See `rl.parts.Publisher.go_on_from`."""
        await asyncio.to_thread(self._checkpoints.set_latest, name, checkpoint)

    async def load(self, name: str, which: str) -> tuple[AdapterRef, PolicySnapshot]:
        """See `rl.parts.Publisher.load`."""
        loaded = await asyncio.to_thread(self._checkpoints.load_checkpoint, name, which)
        policy = await asyncio.to_thread(PolicySnapshot.load, Path(loaded.card.path), loaded.weights)
        return self._books.know(loaded.card.adapter, info_of_checkpoint(loaded.card, loaded.digest)).ref, policy

    def _version(self, ref: AdapterRef) -> Version:
        version = self._books.version(ref)
        if version is None:
            raise UnknownModelError(f"{ref} was unloaded; it cannot go live any more.")
        return version


def _info(weights: AdapterWeights) -> VersionInfo:
    return VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes)
