"""Follower: keeps the adapters of one node in step with the registry.

a version is staged ─▶ fetch its archive ─▶ check ─▶ stage it in the bank ─▶ say that this node holds it
its name goes live  ─▶ make it live here
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from mlx_parallm import atomic
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import AdapterUnavailableError, EngineError, ParaLLMError, RequestError
from mlx_parallm.extras.cluster.archive import unpack
from mlx_parallm.extras.cluster.cards import SharedVersion, VersionState
from mlx_parallm.extras.cluster.head_client import HeadUnreachableError

_AGAIN_S, _TRY_AGAIN_S = 0.5, 5.0

_log = logging.getLogger(__name__)


class NodeAdapters(Protocol):
    """The adapters of this node."""

    def live(self, name: str) -> AdapterRef | None:
        """The live version of a name."""

    async def hold(self, ref: AdapterRef, folder: Path) -> None:
        """Adds the adapter in a folder under this name and number, and stages it. It is not live yet."""

    async def flip(self, ref: AdapterRef) -> None:
        """Makes a version live."""

    def release(self, ref: AdapterRef) -> None:
        """Forgets a version that it holds, once no request uses it."""


class RegistryFollower:
    """Follows the registry until it is cancelled.

    Args:
        fetch: gives the archive of a version.
        folder: where archives are unpacked for a moment.
        on_change: called when `holds` or `state` has changed.

    Attributes:
        state: the registry as it was read last.
        unusable: versions that cannot be served here, with the reason. They are tried again after a fault of the
            network, the disk or the device.
        followed: set once this node serves what it could of a state of the registry.
    """

    def __init__(
        self,
        adapters: NodeAdapters,
        fetch: Callable[[SharedVersion], Awaitable[bytes]],
        folder: Path,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._adapters = adapters
        self._fetch = fetch
        self._folder = folder
        self._on_change = on_change
        self._held: dict[AdapterRef, SharedVersion] = {}
        self.state = VersionState()
        self.unusable: dict[AdapterRef, str] = {}
        self.followed = asyncio.Event()
        self._try_again: set[AdapterRef] = set()

    @property
    def holds(self) -> tuple[str, ...]:
        """The versions that this node can serve."""
        return tuple(str(ref) for ref in sorted(self._held, key=lambda ref: (ref.name, ref.version)))

    def has(self, ref: AdapterRef) -> bool:
        """Whether this node holds a version. One of the same name and number that a client has loaded does not count:
        it may have other content."""
        return ref in self._held

    async def run(self, states: AsyncIterator[VersionState]) -> None:
        """Acts on each state of the registry. While it does, later ones are skipped but for the newest."""
        news = asyncio.Event()

        async def read() -> None:
            async for state in states:
                self.state = state
                news.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TRY_AGAIN_S if self._try_again else None):
                        await news.wait()
                news.clear()
                try:
                    await self._follow(self.state)
                    self.followed.set()
                except Exception as error:  # noqa: BLE001 - NATS or the head starts again, a device or disk has failed
                    _log.warning("%s", str(error) or repr(error))
                    await asyncio.sleep(_AGAIN_S)
                    news.set()

    async def _follow(self, state: VersionState) -> None:
        usable_again = self._try_again | (self.unusable.keys() - state.staged.keys())
        self.unusable = {ref: reason for ref, reason in self.unusable.items() if ref not in usable_again}
        self._try_again.clear()
        for version in list(self._held.values()):
            if not _is_staged(version, state):
                del self._held[version.ref]
                self._adapters.release(version.ref)
        for version in self._missing(state):
            await self._hold(version)
        for name, version in state.live.items():
            if version.ref in self._held and self._adapters.live(name) != version.ref:
                await self._flip(version)
        await self._on_change()

    async def _flip(self, version: SharedVersion) -> None:
        """Makes a version live. One that somebody has unloaded here is fetched again."""
        try:
            await self._adapters.flip(version.ref)
        except (RequestError, AdapterUnavailableError) as error:
            _log.error("%s cannot go live here, and is fetched again: %s", version.ref, error)
            del self._held[version.ref]
            self._adapters.release(version.ref)
            self.unusable[version.ref] = str(error)
            self._try_again.add(version.ref)

    def _missing(self, state: VersionState) -> list[SharedVersion]:
        """Versions to fetch, in the order of their numbers, because a node takes no number below one that it has had.
        Those older than the live one are left to the nodes that have them already."""
        known = self._held.keys() | self.unusable.keys()
        wanted = [version for ref, version in state.staged.items() if ref not in known]
        live = {name: version.version for name, version in state.live.items()}
        newer = [version for version in wanted if version.version >= live.get(version.name, 0)]
        return sorted(newer, key=lambda version: (version.name, version.version))

    async def _hold(self, version: SharedVersion) -> None:
        folder = self._folder / f"{version.name}-{version.version}"
        try:
            archive = await self._fetch(version)
            await asyncio.to_thread(_unpack_anew, archive, folder)
            await self._adapters.hold(version.ref, folder)
        except HeadUnreachableError:
            raise
        except Exception as error:  # noqa: BLE001 - the other versions are served all the same
            _log.error("%s cannot be served here: %s", version.ref, error)
            self.unusable[version.ref] = str(error)
            if isinstance(error, EngineError) or not isinstance(error, ParaLLMError):  # not the version's own fault
                self._try_again.add(version.ref)
            return
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._held[version.ref] = version
        await self._on_change()


def _is_staged(version: SharedVersion, state: VersionState) -> bool:
    staged = state.staged.get(version.ref)
    return staged is not None and staged.sha256 == version.sha256


def _unpack_anew(archive: bytes, folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
    atomic.make_folder(folder.parent)
    unpack(archive, folder)
