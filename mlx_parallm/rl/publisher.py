"""Publisher: makes versions of trained policies in the running server, and saves and loads their checkpoints.

`AdapterCheckpoints` remembers which version of one adapter was the best, and saves it before others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mlx_parallm.adapters.checkpoints.store import CheckpointStore
from mlx_parallm.adapters.library import info_of_checkpoint
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard
from mlx_parallm.core.futures import then
from mlx_parallm.errors import AdapterFileError, ConflictError, UnknownModelError
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.learn.learner import Learner
from mlx_parallm.rl.learn.policy import PolicySnapshot, PolicyState

BEST = "best"
"""The tag of the best version's checkpoint."""

_BASE_ROUTE = {BASE_ADAPTER.name: 1.0}

_log = logging.getLogger(__name__)


class Publisher:
    """Event loop's thread only, except `publish_on_device`.

    Args:
        registry: the registry of `service`.
        checkpoints: those of this run.
    """

    def __init__(
        self, service: AdapterService, registry: AdapterRegistry, learner: Learner, checkpoints: CheckpointStore
    ) -> None:
        self._service = service
        self._registry = registry
        self._learner = learner
        self._checkpoints = checkpoints

    # -- versions --------------------------------------------------------------------------------

    def live(self, name: str) -> AdapterRef | None:
        """The live version of a name."""
        version = self._registry.live(name)
        return version.ref if version else None

    def publish_on_device(
        self, name: str, weights: AdapterWeights, on_added: Callable[[AdapterRef], None]
    ) -> Future[AdapterRef]:
        """`stage` and `flip` for a caller on the device thread. `weights`: MLX arrays."""
        first = self._is_first(name)

        def serve_first(ref: AdapterRef) -> AdapterRef:
            if first:
                self.serve_default()
            return ref

        return then(self._service.publish_on_device(name, weights, on_added), serve_first)

    async def stage(self, name: str, on_added: Callable[[AdapterRef], None]) -> AdapterRef:
        """Stages a new version with the learner's current weights, which never leave the device. It is not live.

        `on_added`: called with the version before any request can use it.
        """
        return await self._service.stage_trained(name, await self._learner.weights(name), on_added)

    async def flip(self, ref: AdapterRef) -> None:
        """Makes a version live."""
        first = self._is_first(ref.name)
        await self._service.flip(ref)
        if first:
            self.serve_default()

    def _is_first(self, name: str) -> bool:
        """Whether a version would be the default adapter's first one, which takes over the base model's requests."""
        return self._registry.live(name) is None and name == self._registry.default_adapter

    def serve_default(self) -> None:
        """Routes requests that name no adapter to the default adapter, if it is live and they go to the base model."""
        name = self._registry.default_adapter
        if self._registry.live(name) is not None and dict(self._registry.route()) == _BASE_ROUTE:
            self._registry.set_route({name: 1.0})

    def discard(self, ref: AdapterRef) -> None:
        """Forgets a staged version that is not to go live."""
        self._registry.discard(ref)

    @contextmanager
    def lease(self, ref: AdapterRef) -> Iterator[None]:
        """While the block runs, the version is not forgotten. Raises UnknownModelError: it was."""
        with self._registry.lease(str(ref)):
            yield

    async def weights(self, name: str) -> tuple[AdapterRef, AdapterWeights]:
        """The live version and its weights as published, as NumPy arrays. Raises UnknownModelError: nothing is live."""
        with self._registry.lease(name) as version:
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
        """Writes a version and its optimizer state as checkpoint `step`. None: the policy's step or, if a rollback has
        left another checkpoint there, the next free step.

        Raises:
            ConflictError: there is a checkpoint of `step` with other content.
            StorageError: the disk failed.
        """
        write = self._checkpoints.save_checkpoint
        save = partial(write, ref, policy.weights, tags=tags, metrics=metrics, extra=policy.save)
        try:
            card = await asyncio.to_thread(save, step=policy.step if step is None else step)
        except ConflictError:
            if step is not None:
                raise
            card = await asyncio.to_thread(save)
        if version := self._registry.version(ref):
            self._registry.set_checkpoint(version, card.path, card.name)
        return card

    def checkpoints(self, name: str) -> tuple[CheckpointCard, ...]:
        """The checkpoints of an adapter, oldest first."""
        return self._checkpoints.cards(name)

    async def set_latest(self, name: str, checkpoint: str) -> None:
        """Makes a restart resume from this checkpoint, until there is a newer one."""
        await asyncio.to_thread(self._checkpoints.set_latest, name, checkpoint)

    async def load(self, name: str, which: str) -> tuple[AdapterRef, PolicySnapshot]:
        """A checkpoint's version, known to the server but not live, and its policy.

        Raises:
            UnknownModelError, AdapterFileError: there is no such checkpoint; it cannot be used.
        """
        loaded = await asyncio.to_thread(self._checkpoints.load_checkpoint, name, which)
        policy = await asyncio.to_thread(PolicySnapshot.load, Path(loaded.card.path), loaded.weights)
        return self._registry.restore(loaded.card.adapter, info_of_checkpoint(loaded.card, loaded.digest)).ref, policy


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """A version, its policy, and metrics for its checkpoint.

    `policy` None: a new policy if `ref` is BASE_ADAPTER; otherwise the policy is in the version's checkpoint.
    """

    ref: AdapterRef
    policy: PolicyState | PolicySnapshot | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AdapterCheckpoints:
    """The checkpoints of one adapter in training, and its best version. `failures`: checkpoints that were not saved.

    The server does not forget the best version while it is the best. Its policy is held by reference until the next
    checkpoint is saved. The best version is saved first, because training resumes from the checkpoint saved last.
    """

    def __init__(self, name: str, learner: Learner, publisher: Publisher, emit: Emit) -> None:
        self.best: TrainedVersion | None = None
        self.failures = 0
        self._name = name
        self._learner = learner
        self._publisher = publisher
        self._emit = emit
        self._lease = ExitStack()

    # -- the best version ------------------------------------------------------------------------

    def set_best(self, best: TrainedVersion | None) -> None:
        """Makes this version the best one. A version that was unloaded meanwhile cannot be."""
        lease = ExitStack()
        try:
            if best is not None:
                lease.enter_context(self.lease(best))
        except UnknownModelError as error:
            _log.warning("the best version of %s stays as it is: %s", self._name, error)
            return
        self._lease.close()
        self._lease, self.best = lease, best

    def lease(self, version: TrainedVersion) -> AbstractContextManager[None]:
        """While the block runs, the version is not forgotten."""
        return nullcontext() if version.ref == BASE_ADAPTER else self._publisher.lease(version.ref)

    async def load_best(self) -> TrainedVersion | None:
        """The checkpoint tagged `best`; None if there is none that can be used."""
        try:
            return TrainedVersion(*await self._publisher.load(self._name, BEST))
        except (UnknownModelError, AdapterFileError):
            return None

    async def find(self, which: str | None) -> TrainedVersion:
        """The best version (None or `best`), or a checkpoint by name or tag.

        Raises:
            ConflictError: there is no best version.
            UnknownModelError, AdapterFileError: there is no such checkpoint; it cannot be used.
        """
        if which not in (None, BEST):
            return TrainedVersion(*await self._publisher.load(self._name, str(which)))
        best = self.best
        if best is None or (best.policy is None and best.ref != BASE_ADAPTER):
            best = await self.load_best()
        if best is None:
            raise ConflictError(f"{self._name!r} has no best version yet: name a checkpoint.", param="to")
        return best

    # -- saving ----------------------------------------------------------------------------------

    def newest_of(self, ref: AdapterRef | None) -> CheckpointCard | None:
        """The newest checkpoint of a version."""
        cards = [card for card in self._publisher.checkpoints(self._name) if card.adapter == ref]
        return cards[-1] if cards else None

    async def save(
        self,
        ref: AdapterRef,
        policy: PolicyState | PolicySnapshot,
        metrics: Mapping[str, float],
        tags: Sequence[str] = (),
        step: int | None = None,
    ) -> CheckpointCard:
        """Saves a version, and before it the best one if that is not saved yet.

        Raises:
            Exception: see `Publisher.save`. It is counted in `failures`.
        """
        try:
            if self.best is not None and self.best.ref == ref:
                tags = [*tags, BEST]
            elif self.best is not None and self.best.policy is not None:
                await self._write(self.best.ref, self.best.policy, self.best.metrics, [BEST])
                self._drop_best_policy()
            card = await self._write(ref, policy, metrics, tags, step)
        except Exception as error:
            _log.error("a checkpoint of %s was not saved: %s", ref, error)
            self.failures += 1
            raise
        if BEST in tags:
            self._drop_best_policy()
        return card

    async def set_latest(self, checkpoint: str) -> None:
        """Makes a restart resume from this checkpoint. An error is only logged and counted."""
        try:
            await self._publisher.set_latest(self._name, checkpoint)
        except Exception as error:  # noqa: BLE001 - the version is live already, whatever a restart resumes from
            _log.error("a restart would not begin with %s of %s: %s", checkpoint, self._name, error)
            self.failures += 1

    def _drop_best_policy(self) -> None:
        """Frees the best version's policy, which is on disk now."""
        if self.best is not None:
            self.best = TrainedVersion(self.best.ref)

    async def _write(
        self,
        ref: AdapterRef,
        policy: PolicyState | PolicySnapshot,
        metrics: Mapping[str, float],
        tags: Sequence[str],
        step: int | None = None,
    ) -> CheckpointCard:
        card = await self._publisher.save(ref, await self._learner.snapshot(policy), tags, metrics, step)
        self._emit("checkpoint", adapter=self._name, version=str(ref), checkpoint=card.name, tags=[*tags])
        return card
