"""AllAdapters: the adapters of all base models as one, for routes. Their names are unique on a server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.adapters.cards import AdapterCard, AdapterStats, CheckpointCard, KeptPart
from mlx_parallm.app.base_model import BaseModel
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef, check_name, name_and_step
from mlx_parallm.core.models import BaseModels
from mlx_parallm.errors import InvalidRequestError, UnknownModelError
from mlx_parallm.rl.deletion import Deletion

if TYPE_CHECKING:
    from mlx_parallm.extras.hub import AllowedAdapters

_SUMS = ("slots", "slots_used", "slots_pinned", "bank_bytes", "copies")


class AllAdapters:
    """Implements `core.AdapterClient`. What needs the weights of an adapter loads its base model first.

    Args:
        owner: the name of the base model that has an adapter; None if there is no such adapter.
        bases_of: the names of the base models for which the adapter in a folder may have been made. Blocks on the disk.
        deletion: of what is kept of an adapter.
        hub: downloads adapters that are named by their hub ids; None: there are none.
    """

    def __init__(
        self,
        bases: Sequence[BaseModel],
        models: BaseModels,
        owner: Callable[[str], str | None],
        bases_of: Callable[[Path], tuple[str, ...]],
        deletion: Deletion,
        hub: AllowedAdapters | None = None,
    ) -> None:
        self._owner = owner
        self._bases = {base.name: base for base in bases}
        self._models = models
        self._bases_of = bases_of
        self._first = bases[0]
        self._deletion = deletion
        self._hub = hub

    def _of(self, selector: str | None) -> BaseModel:
        """The base model of an adapter: the first one if no other has it."""
        base = self._bases[self._models.find(selector)]
        return base if base.described else self._first

    def _described(self) -> list[BaseModel]:
        return [base for base in self._bases.values() if base.described]

    # -- selectors -------------------------------------------------------------------------------

    def lease(self, selector: str | None, key: str | None = None) -> AbstractContextManager[AdapterRef]:
        """See `core.AdapterClient.lease`."""
        return self._of(selector).adapters.lease(selector, key)

    def find(self, selector: str) -> AdapterCard:
        """See `core.AdapterClient.find`."""
        base = self._of(selector)
        return dataclasses.replace(base.adapters.find(selector), base=base.name)

    def cards(self) -> tuple[AdapterCard, ...]:
        """See `core.AdapterClient.cards`."""
        return tuple(
            dataclasses.replace(card, base=base.name) for base in self._described() for card in base.adapters.cards()
        )

    def stats(self) -> AdapterStats:
        """See `core.AdapterClient.stats`."""
        each = [base.adapters.stats() for base in self._described()]
        totals = [field.name for field in fields(AdapterStats) if field.name.endswith("_total")]
        return dataclasses.replace(
            each[0],
            **{name: sum(getattr(stats, name) for stats in each) for name in (*_SUMS, *totals)},
            running=tuple(sorted({name for stats in each for name in stats.running})),
            waiting=tuple(sorted({name for stats in each for name in stats.waiting})),
        )

    # -- loading and unloading -------------------------------------------------------------------

    async def load(self, name: str, path: str, replace: bool, base: str | None = None) -> AdapterCard:
        """See `core.AdapterClient.load`."""
        if self._hub is not None and self._hub.has(path):
            path = str(await asyncio.to_thread(self._hub.download, path))
        folder = await self.folder_of(path)
        base = base or await self._base_of(Path(folder))
        adapter, _ = name_and_step(name)
        owner = self._owner(adapter)
        if owner not in (None, base):
            raise InvalidRequestError(
                f"lora_name: {adapter!r} is an adapter of {owner}, and this one is for {base}; choose another name",
                "lora_name",
            )
        async with self._models.use(base):
            card = await self._bases[base].adapters.load(name, folder, replace)
            return dataclasses.replace(card, base=base)

    async def _base_of(self, folder: Path) -> str:
        """The base model for which the adapter in a folder was made: the one that its files name, else the first."""
        bases = await asyncio.to_thread(self._bases_of, folder)
        if len(bases) > 1:
            raise InvalidRequestError(
                f"lora_path: the files there may mean the base model {' or '.join(bases)}; say which one with "
                "base_model_name.",
                "lora_path",
            )
        return bases[0] if bases else self._first.name

    async def folder_of(self, path: str) -> str:
        """See `core.AdapterClient.folder_of`."""
        return str(await asyncio.to_thread(self._first.known.library.roots.resolve, path))

    async def load_folder(self, path: str) -> str:
        """See `core.AdapterClient.load_folder`. The adapter is for the first base model."""
        async with self._models.use(self._first.name):
            return await self._first.adapters.load_folder(path)

    async def loaded_folder(self, path: str) -> str | None:
        """See `core.AdapterClient.loaded_folder`."""
        return await self._first.adapters.loaded_folder(path)

    @property
    def has_default_folder(self) -> bool:
        """See `core.AdapterClient.has_default_folder`."""
        return self._first.adapters.has_default_folder

    async def default_name(self) -> str | None:
        """See `core.AdapterClient.default_name`."""
        async with self._models.use(self._first.name):
            return await self._first.adapters.default_name()

    async def unload(self, selector: str, base: str | None = None) -> tuple[AdapterRef, ...]:
        """See `core.AdapterClient.unload`."""
        if base is not None and (owner := self.find(selector).base) != base:
            raise UnknownModelError(f"{base} has no adapter {selector!r}; that is one of {owner}.")
        return await self._of(selector).adapters.unload(selector)

    async def delete(self, name: str, dry_run: bool) -> tuple[KeptPart, ...]:
        """See `core.AdapterClient.delete`."""
        versions = [card for card in self.cards() if card.ref.name == name]
        in_memory = [KeptPart("versions that are loaded", "", len(versions))] if versions else []
        parts = (*in_memory, *await self._deletion.parts(check_name(name)))
        if not parts:
            raise UnknownModelError(f"There is no adapter {name!r}, and nothing is kept of one.", param="lora_name")
        if not dry_run:
            if versions:
                await self.unload(name)
            for base in self._described():
                base.known.library.forget(name)
            await self._deletion.remove(name)
        return parts

    # -- the route, which is the first base model's ----------------------------------------------

    def route(self) -> Mapping[str, float]:
        """See `core.AdapterClient.route`."""
        return self._first.adapters.route()

    async def set_route(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """See `core.AdapterClient.set_route`."""
        for selector in weights:
            if selector != BASE_ADAPTER.name and (owner := self._models.find(selector)) != self._first.name:
                raise InvalidRequestError(
                    f"weights: {selector!r} is an adapter of {owner}, and requests that name no adapter get one of "
                    f"{self._first.name}.",
                    param="weights",
                )
        async with self._models.use(self._first.name):
            return await self._first.adapters.set_route(weights)

    async def rollback(self, name: str | None) -> tuple[AdapterRef, Mapping[str, float]]:
        """See `core.AdapterClient.rollback`."""
        return await self._of(name).adapters.rollback(name)

    # -- checkpoints, which are the first base model's -------------------------------------------

    def checkpoints(self) -> tuple[CheckpointCard, ...]:
        """See `core.AdapterClient.checkpoints`."""
        return self._first.adapters.checkpoints()

    async def save_checkpoint(
        self, selector: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """See `core.AdapterClient.save_checkpoint`."""
        base = self._of(selector)
        async with self._models.use(base.name):
            return await base.adapters.save_checkpoint(selector, step, tags, metrics)
