"""What a key that is limited to some adapters sees of the server: the same parts, without all other adapters.

Routes get these views in place of the adapters and base models (see `services.services_of`). Training is asked with a
`Reader` instead, and lists that join several parts ask `NamedKey.sees`. A name that the key may not see is answered as
an unknown name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import PurePath

from mlx_parallm.adapters.cards import AdapterCard, AdapterStats, CheckpointCard, KeptPart
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterClient, AdapterRef
from mlx_parallm.core.models import BaseModels, BaseStatus, ServedModel
from mlx_parallm.errors import AdapterFileError, InvalidRequestError, RoleError, UnknownModelError
from mlx_parallm.server.access import NamedKey

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+|latest")


def shared(what: str) -> RoleError:
    """The error about something that concerns the adapters of all keys."""
    return RoleError(f"{what} concerns the adapters of all keys, and this key is limited to some of them.")


class SeenAdapters:
    """Implements `core.AdapterClient` for a key that is limited to some adapters."""

    def __init__(self, adapters: AdapterClient, key: NamedKey, base_names: Sequence[str]) -> None:
        self._adapters, self._key = adapters, key
        self._base_names = base_names

    def unknown(self, selector: str | None) -> UnknownModelError:
        """The error about an unknown name, as far as the key knows."""
        names = [card.ref.name for card in self.cards() if card.live]
        if self._key.sees(BASE_ADAPTER.name):
            names = [*self._base_names, BASE_ADAPTER.name, *names]
        if selector is None:
            return UnknownModelError(
                "Requests that name no model or adapter get one that this key may not use; name one of: "
                f"{', '.join(names[:10]) or 'none'}."
            )
        return UnknownModelError.listing(selector, names)

    def check(self, selector: str) -> None:
        """Raises UnknownModelError unless the selector means a version that the key sees."""
        if not self._seen(selector):
            raise self.unknown(selector)

    def _seen(self, selector: str) -> bool:
        """Whether the selector means a version, or the base model, that the key sees."""
        if selector == BASE_ADAPTER.name:
            return self._key.sees(selector)
        try:
            return self._key.sees(self._adapters.find(selector).ref.name)
        except UnknownModelError:
            return False

    async def _check_path(self, path: str) -> None:
        """Raises UnknownModelError unless the name of the adapter's folder is one that the key sees, and so is the one
        of the adapter that a run or a tag means. A checkpoint has the name of the folder that it is in."""
        if not self._sees_path(path):
            raise self.unknown(path)
        try:
            seen = self._sees_path(await self._adapters.folder_of(path))
        except AdapterFileError:  # it names the adapters of a run
            seen = False
        except InvalidRequestError:  # the caller gets it when it uses the path
            return
        if not seen:
            raise self.unknown(path)

    def _sees_path(self, path: str) -> bool:
        parts = PurePath(os.path.normpath(path)).parts
        names = [part for part in parts if not _CHECKPOINT.fullmatch(part)]
        return bool(names) and ".." not in PurePath(path).parts and self._key.sees(names[-1])

    # -- core.AdapterClient ----------------------------------------------------------------------

    @contextmanager
    def lease(self, selector: str | None, key: str | None = None) -> Iterator[AdapterRef]:
        """See `core.AdapterClient.lease`. Without a selector, the key must see all that the route may choose."""
        if selector is not None:
            self.check(selector)
        elif len(self.route()) < len(self._adapters.route()):
            raise self.unknown(None)
        with self._adapters.lease(selector, key) as ref:
            yield ref

    def find(self, selector: str) -> AdapterCard:
        """See `core.AdapterClient.find`."""
        if selector == BASE_ADAPTER.name or not self._seen(selector):
            raise self.unknown(selector)
        return self._adapters.find(selector)

    def cards(self) -> tuple[AdapterCard, ...]:
        """See `core.AdapterClient.cards`."""
        return tuple(card for card in self._adapters.cards() if self._key.sees(card.ref.name))

    async def load(self, name: str, path: str, replace: bool, base: str | None = None) -> AdapterCard:
        """See `core.AdapterClient.load`."""
        if not self._key.sees(new := name.partition("@")[0]):
            raise self.unknown(new)
        await self._check_path(path)
        return await self._adapters.load(name, path, replace, base)

    async def folder_of(self, path: str) -> str:
        """See `core.AdapterClient.folder_of`."""
        await self._check_path(path)
        return await self._adapters.folder_of(path)

    async def loaded_folder(self, path: str) -> str | None:
        """See `core.AdapterClient.loaded_folder`."""
        await self._check_path(path)
        return self._seen_folder(path, await self._adapters.loaded_folder(path))

    async def load_folder(self, path: str) -> str:
        """See `core.AdapterClient.load_folder`."""
        await self._check_path(path)
        name = await self._adapters.load_folder(path)
        self._seen_folder(path, name)
        return name

    def _seen_folder(self, path: str, name: str | None) -> str | None:
        """The name of a folder's live adapter. Raises UnknownModelError unless the key sees it."""
        if name is not None and not self._key.sees(name):
            raise self.unknown(path)
        return name

    @property
    def has_default_folder(self) -> bool:
        """See `core.AdapterClient.has_default_folder`."""
        return self._adapters.has_default_folder

    async def default_name(self) -> str | None:
        """See `core.AdapterClient.default_name`."""
        name = await self._adapters.default_name()
        if name is not None and not self._key.sees(name):
            raise self.unknown(None)
        return name

    async def unload(self, selector: str, base: str | None = None) -> tuple[AdapterRef, ...]:
        """See `core.AdapterClient.unload`."""
        self.check(selector)
        return await self._adapters.unload(selector, base)

    async def delete(self, name: str, dry_run: bool) -> tuple[KeptPart, ...]:
        """See `core.AdapterClient.delete`."""
        if not self._key.sees(name):
            raise self.unknown(name)
        return await self._adapters.delete(name, dry_run)

    def route(self) -> Mapping[str, float]:
        """The part of the route that the key sees, so that the shares may add up to less than 1."""
        return {name: share for name, share in self._adapters.route().items() if self._seen(name)}

    async def set_route(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Raises RoleError: the route is everybody's."""
        raise shared("The route of requests that name no adapter")

    async def rollback(self, name: str | None) -> tuple[AdapterRef, Mapping[str, float]]:
        """See `core.AdapterClient.rollback`. Raises RoleError for the route, which is everybody's."""
        if name is None:
            raise shared("The route of requests that name no adapter")
        self.check(name)
        live, _ = await self._adapters.rollback(name)
        return live, self.route()

    def checkpoints(self) -> tuple[CheckpointCard, ...]:
        """See `core.AdapterClient.checkpoints`."""
        return tuple(card for card in self._adapters.checkpoints() if self._key.sees(card.adapter.name))

    async def save_checkpoint(
        self, selector: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """See `core.AdapterClient.save_checkpoint`."""
        if selector is None:
            raise self.unknown(None)
        self.check(selector)
        return await self._adapters.save_checkpoint(selector, step, tags, metrics)

    def stats(self) -> AdapterStats:
        """See `core.AdapterClient.stats`."""
        stats = self._adapters.stats()
        running, waiting = (tuple(filter(self._key.sees, names)) for names in (stats.running, stats.waiting))
        return replace(stats, running=running, waiting=waiting)


class SeenModels:
    """Implements `core.BaseModels` for a key that is limited to some adapters. `base` stands for all base models."""

    def __init__(self, models: BaseModels, adapters: SeenAdapters, key: NamedKey) -> None:
        self._models, self._adapters, self._key = models, adapters, key

    @property
    def first(self) -> ServedModel:
        """See `core.BaseModels.first`."""
        return self._models.first

    @property
    def names(self) -> frozenset[str]:
        """See `core.BaseModels.names`."""
        return self._models.names

    def find(self, *names: str | None) -> str:
        """See `core.BaseModels.find`. Raises UnknownModelError: the names mean a base model which is loaded only for an
        adapter of it that the key sees, or for a key that sees `base`, and neither is so."""
        bases = [name for name in names if name in self._models.names]
        adapters = [name for name in names if name not in bases and name and self._key.sees(name.partition("@")[0])]
        base = self._models.find(*bases, *adapters)
        if base not in (self.first.card.name, self._models.find(*adapters)) and not self._key.sees(BASE_ADAPTER.name):
            raise UnknownModelError(str(self._adapters.unknown(bases[0])), param="model")
        return base

    def use(self, base: str) -> AbstractAsyncContextManager[ServedModel]:
        """See `core.BaseModels.use`."""
        return self._models.use(base)

    def is_ready(self, base: str) -> bool:
        """See `core.BaseModels.is_ready`."""
        return self._models.is_ready(base)

    def statuses(self) -> tuple[BaseStatus, ...]:
        """See `core.BaseModels.statuses`."""
        return tuple(
            replace(status, adapters=tuple(filter(self._key.sees, status.adapters)))
            for status in self._models.statuses()
        )

    def close(self) -> None:
        """Nothing is closed: the models are everybody's."""
