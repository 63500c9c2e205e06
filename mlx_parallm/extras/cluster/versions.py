"""The registry of shared adapter versions, in the bucket `versions`.

    staged.NAME.VERSION    its archive is complete at the head, so every node can fetch it
    live.NAME              the version that the name means; changed by compare-and-set alone
    trained.NAME           a trainer has trained this name, so trajectories for it may be sent

A version never changes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import cast

from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.cluster.cards import SharedVersion, VersionState
from mlx_parallm.extras.cluster.connection import PROBE, Connection, key_of, stored
from mlx_parallm.extras.cluster.records import from_json, to_json

KEPT = 3
"""How many versions of a name stay staged, the live one included."""
_MARKER_S = 60.0
"""How long NATS keeps the marker of a removed key, in seconds."""


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """The live version of a name. `revision` goes with it into `Versions.go_live`."""

    version: SharedVersion
    revision: int


class Versions:
    """Reads and changes the registry. All methods raise StorageError if NATS cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bucket = connection.versions

    async def stage(self, version: SharedVersion) -> None:
        """Announces a version whose archive is complete. Doing so again changes nothing.

        Raises:
            ConflictError: a version of this name and number has another content.
        """
        async with stored():
            try:
                await self._bucket.create(_staged(version.ref), to_json(version))
            except KeyWrongLastSequenceError:
                await self.check(version.ref, version.sha256)

    async def check(self, ref: AdapterRef, sha256: str) -> None:
        """Checks that a version may have the archive with this checksum.

        Raises:
            ConflictError: it is staged with another content.
        """
        async with stored():
            known, _ = await self._read(_staged(ref))
        if known is not None and known.sha256 != sha256:
            raise ConflictError(f"{ref} has another content already; publish a new version")

    async def live(self, name: str) -> LiveVersion | None:
        """The live version of a name; None if it has none."""
        async with stored():
            version, revision = await self._read(_live(name))
        return None if version is None else LiveVersion(version, revision)

    async def now(self) -> VersionState:
        """The registry as it is. Waits while NATS cannot be reached."""
        async with aclosing(cast(AsyncGenerator[VersionState, None], self.follow())) as states:
            return await anext(states)

    async def go_live(self, version: SharedVersion, after: LiveVersion | None) -> LiveVersion:
        """Makes a staged version live, if `after` is still the live one.

        Raises:
            ConflictError: it is not, or the version is not staged, or its fence is lower than that of `after`.
        """
        if after is not None and version.fence < after.version.fence:
            raise ConflictError(
                f"{version.ref} cannot go live: its trainer has lost its lease to another ({after.version.fence})"
            )
        async with stored():
            staged, _ = await self._read(_staged(version.ref))
            if staged is None or staged.sha256 != version.sha256:
                raise ConflictError(f"{version.ref} cannot go live: it is not staged; upload it first")
            try:
                last = after.revision if after is not None else 0
                revision = await self._bucket.update(_live(version.name), to_json(version), last)
            except KeyWrongLastSequenceError:
                raise ConflictError(
                    f"{version.ref} cannot go live: another version of {version.name!r} went live meanwhile"
                ) from None
        return LiveVersion(version, revision)

    async def take_over(self, name: str, fence: int) -> None:
        """Begins a new lease of a trainer: from now on, `go_live` refuses whatever has a lower fence."""
        async with stored():
            await self._bucket.put(f"trained.{key_of(name)}", name.encode())
            while True:
                version, revision = await self._read(_live(name))
                if version is None or version.fence >= fence:
                    return
                with suppress(KeyWrongLastSequenceError):  # another version went live meanwhile
                    await self._bucket.update(_live(name), to_json(replace(version, fence=fence)), revision)

    async def remove_old(self, state: VersionState, name: str) -> tuple[SharedVersion, ...]:
        """Removes the staged versions of a name that are older than the live one, but for the newest of them. Returns
        those that were removed. The head calls it."""
        live = state.live.get(name)
        older = sorted(
            (version for version in state.staged.values() if live and version.name == name),
            key=lambda version: version.version,
        )
        going = tuple(version for version in older if live and version.version < live.version)[: -(KEPT - 1)]
        async with stored():
            for version in going:
                await self._bucket.purge(_staged(version.ref), msg_ttl=_MARKER_S)
        return going

    async def follow(self) -> AsyncIterator[VersionState]:
        """Yields the state now, and again after each change."""
        live: dict[str, SharedVersion] = {}
        staged: dict[AdapterRef, SharedVersion] = {}
        keys: dict[str, SharedVersion] = {}
        trained: set[str] = set()
        complete = False
        async for change in self._connection.follow(self._bucket):
            if change is None:
                complete = True
            elif change.key == PROBE:
                continue
            elif change.value is None:
                keys.pop(change.key, None)
            elif change.key.startswith("trained."):
                trained.add(change.value.decode())
            elif (version := from_json(SharedVersion, change.value)) is not None:
                keys[change.key] = version
            if complete:
                live = {version.name: version for key, version in keys.items() if key.startswith("live.")}
                staged = {version.ref: version for key, version in keys.items() if key.startswith("staged.")}
                yield VersionState(live, staged, frozenset(trained))

    async def _read(self, key: str) -> tuple[SharedVersion | None, int]:
        try:
            entry = await self._bucket.get(key)
        except KeyNotFoundError:
            return None, 0
        return from_json(SharedVersion, entry.value or b""), entry.revision or 0


def _live(name: str) -> str:
    return f"live.{key_of(name)}"


def _staged(ref: AdapterRef) -> str:
    return f"staged.{key_of(ref.name)}.{ref.version}"
