"""AdapterSync: which adapter versions the server of an outside engine has, and when it gets another one."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.adapters.formats import FormatName
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import EngineError
from mlx_parallm.extras.engines.api import EngineApi, SentAdapter

_log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_LONGEST_NAME = 32
"""Characters of an adapter's name that are part of its name in the server."""

WriteAdapter = Callable[[AdapterRef, Path, FormatName], Awaitable[None]]


@dataclass(eq=False, slots=True)
class _Loaded:
    """A version that the server has. `users`: requests that sample with it."""

    adapter: SentAdapter
    users: int = 0


class AdapterSync:
    """Sends adapter versions to a server, each of them once: a version never changes, so sampling with one that the
    server has sends nothing. Event loop's thread only.

    Each version gets a name and a folder of its own, so that no cache of the server can mix two versions up.

    Args:
        folder: where the files are written. The server reads them there.
        write: writes the files of a version into a new folder.
    """

    def __init__(self, api: EngineApi, folder: Path, write: WriteAdapter) -> None:
        self._api = api
        self._folder = folder.absolute()
        self._write = write
        self._process = secrets.token_hex(4)  # names of a run that was killed may still be loaded
        self._loaded: dict[AdapterRef, _Loaded] = {}
        self._loading = asyncio.Lock()
        self._made_folder = False

    @asynccontextmanager
    async def use(self, ref: AdapterRef) -> AsyncIterator[SentAdapter | None]:
        """The version in the server, at least until the block ends; None for the base model.

        Raises:
            EngineError: it could not be written, or the server did not take it.
        """
        if ref == BASE_ADAPTER:
            yield None
            return
        loaded = self._loaded.get(ref) or await self._load(ref)
        loaded.users += 1
        try:
            yield loaded.adapter
        finally:
            loaded.users -= 1

    async def close(self) -> None:
        """Makes the server forget all versions, as far as it answers within some seconds, and removes their files."""
        loaded = list(self._loaded.values())
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._forget(list(self._loaded))
        except TimeoutError:
            _log.warning("the engine's server does not answer; adapters of this run may still be loaded there")
        finally:
            for entry in loaded:
                shutil.rmtree(entry.adapter.folder, ignore_errors=True)
            if self._made_folder:
                with suppress(OSError):  # others write to it too
                    self._folder.rmdir()

    async def _load(self, ref: AdapterRef) -> _Loaded:
        async with self._loading:
            if loaded := self._loaded.get(ref):
                return loaded
            # Before it is loaded, because a server may have room for one adapter only.
            await self._forget([other for other, loaded in self._loaded.items() if not loaded.users])
            name = f"{ref.name[:_LONGEST_NAME]}-{self._process}-{ref.version}"
            adapter = SentAdapter(name, self._folder / name)
            self._made_folder |= not self._folder.exists()
            try:
                await self._write(ref, adapter.folder, self._api.adapter_format)
                await self._api.load(adapter)
            except BaseException:  # a cancelled caller too
                await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)
                raise
            self._loaded[ref] = loaded = _Loaded(adapter)
            return loaded

    async def _forget(self, refs: list[AdapterRef]) -> None:
        for ref in refs:
            adapter = self._loaded.pop(ref).adapter
            try:
                await self._api.unload(adapter)
            except EngineError as error:
                _log.warning("%s is still loaded: %s", adapter.name, error)
            await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)
