"""ComparedAdapter: one adapter in training, as a comparison of its versions needs it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlx_parallm.core.adapters import INCUMBENT, AdapterRef
from mlx_parallm.errors import ConflictError
from mlx_parallm.rl.checkpoints import PolicyCheckpoints
from mlx_parallm.rl.updates.run import AdapterRun

if TYPE_CHECKING:
    from mlx_parallm.adapters.service import AdapterService


class ComparedAdapter:
    """One adapter in training: what comparisons of its versions ask of its `AdapterRun`."""

    def __init__(self, loop: AdapterRun, checkpoints: PolicyCheckpoints, adapters: AdapterService) -> None:
        self._loop, self._checkpoints, self._adapters = loop, checkpoints, adapters

    @property
    def name(self) -> str:
        return self._loop.name

    @property
    def live(self) -> AdapterRef | None:
        return self._loop.training.live

    def hold(self) -> None:
        """Makes no automatic update any more."""
        self._loop.held = True

    async def settled(self) -> None:
        """Returns when no change is under way."""
        await self._loop.settled()

    def release(self) -> None:
        """Makes automatic updates again, from the trajectories that still fit."""
        self._loop.held = False
        self._loop.sweep()
        self._loop.wake()

    def pause(self, reason: str) -> None:
        self._loop.pause(reason)

    def version(self, selector: str) -> AdapterRef:
        """The version that `name@version`, or the name or tag of a checkpoint, means. Raises UnknownModelError."""
        return self._adapters.find(selector).ref if "@" in selector else self._checkpoints.version(self.name, selector)

    def is_saved(self, ref: AdapterRef) -> bool:
        """Whether a checkpoint has the version, so that training can go on from it."""
        return self._loop.training.checkpoints.newest_of(ref) is not None

    def first_saved(self, ref: AdapterRef) -> float:
        """When a checkpoint first had the version, which is soon after it was made, in Unix time; now if none has."""
        cards = self._loop.training.checkpoints.cards()
        return min((float(card.created) for card in cards if card.adapter == ref), default=time.time())

    def came_from(self, ref: AdapterRef) -> bool:
        """Whether the live version was made by training from `ref`, which is not live any more."""
        return self._loop.training.versions.staleness(ref) == 1

    async def keep(self, ref: AdapterRef) -> None:
        """Saves the live version `ref`, if it is in no checkpoint, and tags its checkpoint as the incumbent.

        Raises:
            ConflictError: training has gone on from the version already, so that it can no longer be saved.
            StorageError: the disk failed.
        """
        if not self.is_saved(ref):
            await self._loop.save(None, (), self._loop.training.reports.metrics)
        card = self._loop.training.checkpoints.newest_of(ref)
        if card is None:
            raise ConflictError(f"{ref} is in no checkpoint, and its policy has unpublished updates")
        await self._checkpoints.tag(self.name, card.name, INCUMBENT)

    def incumbent(self) -> AdapterRef | None:
        """The version that was kept last; None: there is none."""
        cards = self._checkpoints.cards(self.name)
        kept = any(INCUMBENT in card.tags for card in cards)
        return self._checkpoints.version(self.name, INCUMBENT) if kept else None

    async def make_live(self, ref: AdapterRef) -> None:
        """Makes a version live that `is_saved`, and continues training from it."""
        card = self._loop.training.checkpoints.newest_of(ref)
        if card is None:
            raise ConflictError(f"the checkpoint of {ref} was deleted")
        await self._loop.roll_back(card.name)
