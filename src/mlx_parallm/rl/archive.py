"""Archive: what of an adapter outlives the moment: its best version in memory, its checkpoints on disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard
from mlx_parallm.errors import AdapterFileError, ConflictError, UnknownModelError
from mlx_parallm.rl.parts import Publisher
from mlx_parallm.rl.reports import Emit
from mlx_parallm.rl.snapshot import PolicySnapshot

BEST = "best"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedVersion:
    """A version, and the trainer's state that made it. `ref` BASE_ADAPTER: the policy is equal to the base."""

    ref: AdapterRef
    policy: PolicySnapshot


class Archive:
    """`best` cannot be forgotten by the server while it is the best. `failures`: checkpoints that were not saved.

    The best version is saved with the next checkpoint, before it: `latest` is the one that training goes on from.
    """

    def __init__(self, name: str, publisher: Publisher, emit: Emit) -> None:
        self.best: SavedVersion | None = None
        self.failures = 0
        self._name = name
        self._publisher = publisher
        self._emit = emit
        self._kept = ExitStack()
        self._best_is_saved = True

    # -- the best version ------------------------------------------------------------------------

    def set_best(self, best: SavedVersion | None, saved: bool = False) -> None:
        """Keeps this version, and lets go of the one before; one that was unloaded meanwhile cannot be the best."""
        kept = ExitStack()
        try:
            if best is not None:
                kept.enter_context(self.hold(best))
        except UnknownModelError as error:
            _log.warning("the best version of %s stays as it is: %s", self._name, error)
            return
        self._kept.close()
        self._kept, self.best, self._best_is_saved = kept, best, saved

    def hold(self, version: SavedVersion) -> AbstractContextManager[None]:
        """While the block runs the version cannot be forgotten."""
        return nullcontext() if version.ref == BASE_ADAPTER else self._publisher.keep(version.ref)

    async def find_best(self) -> SavedVersion | None:
        """The checkpoint tagged `best`; None: there is none that can be used."""
        try:
            return SavedVersion(*await self._publisher.load(self._name, BEST))
        except (UnknownModelError, AdapterFileError):
            return None

    async def find(self, which: str | None) -> SavedVersion:
        """`best` (None), or a checkpoint by name or tag.

        Raises:
            ConflictError: there is no best version.
            UnknownModelError, AdapterFileError: there is no such checkpoint; it cannot be used.
        """
        if which not in (None, BEST):
            return SavedVersion(*await self._publisher.load(self._name, str(which)))
        best = self.best or await self.find_best()
        if best is None:
            raise ConflictError(f"{self._name!r} has no best version yet: name a checkpoint.", param="to")
        return best

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint_of(self, ref: AdapterRef | None) -> CheckpointCard | None:
        """The newest of that version."""
        cards = [card for card in self._publisher.checkpoints(self._name) if card.adapter == ref]
        return cards[-1] if cards else None

    async def save(self, version: SavedVersion, metrics: Mapping[str, float], tags: Sequence[str] = ()) -> str | None:
        """Saves this version, and the best one where that is due; its checkpoint's name, None where it has none."""
        best = self.best
        if best is not None and best.policy is version.policy:
            tags = [*tags, BEST]
        elif best is not None and best.ref != BASE_ADAPTER and not self._best_is_saved:
            await self._save(best, metrics, [BEST])
        self._best_is_saved = True
        return await self._save(version, metrics, tags)

    async def go_on_from(self, checkpoint: str) -> None:
        """A restart begins with this one."""
        try:
            await self._publisher.go_on_from(self._name, checkpoint)
        except Exception as error:  # noqa: BLE001 - the version is live, whatever a restart begins with
            _log.error("a restart would not begin with %s of %s: %s", checkpoint, self._name, error)
            self.failures += 1

    async def _save(self, version: SavedVersion, metrics: Mapping[str, float], tags: Sequence[str]) -> str | None:
        try:
            card = await self.write(version, metrics, tags)
        except Exception as error:  # noqa: BLE001 - the version is live, whatever becomes of its copy
            _log.error("a checkpoint of %s was not saved: %s", version.ref, error)
            self.failures += 1
            return None
        return card.name if card else None

    async def write(
        self, version: SavedVersion, metrics: Mapping[str, float], tags: Sequence[str], step: int | None = None
    ) -> CheckpointCard | None:
        """See `rl.parts.Publisher.save`."""
        card = await self._publisher.save(version.ref, version.policy, tags, metrics, step)
        if card is not None:
            self._emit("checkpoint", adapter=self._name, version=str(version.ref), checkpoint=card.name, tags=[*tags])
        return card
