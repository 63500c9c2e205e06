"""Node: this process as a member of a cluster: its lease, the other members, and the shared versions that it holds."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm import __version__
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, StorageError
from mlx_parallm.extras.cluster.cards import ClusterStatus, Joined, Joining, Member, NodeInfo, NodeRole, SharedVersion
from mlx_parallm.extras.cluster.connection import Connection
from mlx_parallm.extras.cluster.follower import NodeAdapters, RegistryFollower
from mlx_parallm.extras.cluster.members import Lease, Members
from mlx_parallm.extras.cluster.trajectories import Trajectories
from mlx_parallm.extras.cluster.versions import Versions

_COUNT_S = 2.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What the HTTP server says of itself: whether it takes requests, and the tokens of those under way."""

    ready: bool
    outstanding_tokens: int


class Node(ABC):
    """A node, which the HTTP server of this process uses too, on the event loop's thread. All methods of the head raise
    ConflictError in other nodes.

    Args:
        fingerprint: that of its base model.
        folder: where archives are unpacked for a moment.
    """

    def __init__(self, role: NodeRole, fingerprint: str, token: str, adapters: NodeAdapters, folder: Path) -> None:
        self.token = token
        """The secret that all nodes have."""
        self.role = role
        self.url = ""
        self.id = role.value
        self.follower = RegistryFollower(adapters, self.fetch, folder, self._changed)
        self._build = build_of(fingerprint)
        self._incarnation = secrets.token_hex(8)
        self._report: Callable[[], NodeReport] = lambda: NodeReport(ready=False, outstanding_tokens=0)
        self._connection: Connection | None = None
        self._members: Members | None = None
        self._lease: Lease | None = None
        self._where: Callable[[], str] = lambda: ""
        self._serving = asyncio.Event()
        self._waiting: Mapping[str, int] = {}

    @property
    def routes(self) -> bool:
        """Whether this node is the head, which sends requests to others."""
        return self.role is NodeRole.HEAD

    def serve(self, where: Callable[[], str], report: Callable[[], NodeReport]) -> None:
        """Says that the HTTP server listens. From now on the others see this node, at the URL that `where` returns."""
        self._where, self._report = where, report
        self.locate()
        self._serving.set()

    def locate(self) -> None:
        """Finds out where the others reach this node, which may be in another network than before. Raises ConfigError:
        it is in none."""
        self.url = self._where()
        if self.role is not NodeRole.HEAD:
            self.id = id_of(self.role, self.url)

    def describe(self) -> NodeInfo:
        """What this node says of itself now."""
        report = self._report()
        return NodeInfo(
            self.id,
            self.role,
            self.url,
            self.follower.holds,
            report.outstanding_tokens,
            report.ready,
            self._incarnation,
            self._build,
        )

    @asynccontextmanager
    async def taking_part(self, connection: Connection) -> AsyncIterator[None]:
        """Follows the members and the versions until the block ends, and holds a lease once the server listens."""
        self._connection, self._members = connection, Members(connection, self._build)
        self._lease = Lease(connection, self.describe)
        follow = self.follower.run(Versions(connection).follow())
        async with running(self._members.run(), self._hold_lease(self._lease), follow, self._count(connection)):
            yield

    async def _count(self, connection: Connection) -> None:
        """Counts what waits for trainers, until it is cancelled."""
        stream = Trajectories(connection)
        while True:
            with suppress(StorageError):
                self._waiting = await stream.waiting(self.follower.state.trained)
            await asyncio.sleep(_COUNT_S)

    async def _hold_lease(self, lease: Lease) -> None:
        await self._serving.wait()
        await lease.run()

    async def _changed(self) -> None:
        """What this node holds has changed."""
        if self._lease is not None:
            self._lease.tell()

    @abstractmethod
    async def fetch(self, version: SharedVersion) -> bytes:
        """The archive of a version, with the checksum of the registry."""

    # -- what the HTTP server uses -----------------------------------------------------------------

    def others_with(self, ref: AdapterRef) -> tuple[Member, ...]:
        """The other nodes that can answer requests for this adapter version now."""
        if self._members is None or not (ref == BASE_ADAPTER or self.follower.has(ref)):
            return ()
        return tuple(
            member
            for member in self._members.present()
            if (info := member.info).ready
            and info.id != self.id
            and info.url
            and (ref == BASE_ADAPTER or str(ref) in info.holds)
        )

    def status(self) -> ClusterStatus:
        """The cluster as this node sees it now."""
        members = self._members
        return ClusterStatus(
            self.id,
            self._connection is not None and self._connection.connected,
            tuple(member.info for member in members.present()) if members is not None else (),
            self.follower.state,
            {str(ref): reason for ref, reason in self.follower.unusable.items()},
            members.lost_total if members is not None else 0,
            self._waiting,
        )

    async def send(self, name: str, body: bytes, message_id: str = "") -> None:
        """Sends what the trainer of an adapter is to learn from, and returns when it is on a disk.

        Args:
            name: that of the adapter.
            message_id: a second message with the same one is dropped. Empty: the message has none.

        Raises:
            StorageError: it could not be kept.
        """
        if self._connection is None:
            raise StorageError("this node is not connected to its cluster")
        await Trajectories(self._connection).send(name, body, message_id)

    async def join(self, joining: Joining, reached_at: str) -> Joined:
        """Lets a node join. `reached_at`: the host at which it has reached this one.

        Raises:
            ConflictError: it has another base model, or another version of this package.
        """
        raise self._not_the_head()

    async def base_file(self, name: str) -> Path:
        """A file of the base model. Raises InvalidRequestError: there is no such file."""
        raise self._not_the_head()

    async def put_adapter(self, ref: AdapterRef, archive: bytes, sha256: str, fence: int) -> SharedVersion:
        """Keeps an adapter version and stages it.

        Raises:
            InvalidRequestError: the archive has another checksum, or is not an adapter's.
            ConflictError: there is a version of this name and number with another content, or another trainer has the
                lease of the name.
        """
        raise self._not_the_head()

    async def adapter_file(self, ref: AdapterRef) -> Path:
        """The archive of a version. Raises UnknownModelError: there is none."""
        raise self._not_the_head()

    def _not_the_head(self) -> ConflictError:
        return ConflictError("This node is not the head of its cluster; ask that one, which has --share-model.")


def build_of(fingerprint: str) -> str:
    """What all nodes of a cluster must have in common: the version of this package, and the base model."""
    return f"{__version__} {fingerprint}"


def id_of(role: NodeRole, url: str) -> str:
    """The id of a node, which is the same after each start at this address."""
    return f"{role}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


_CANCEL_AGAIN_S = 0.5
"""Seconds after which tasks that have not ended are cancelled again."""


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs coroutines beside the block, and cancels them when it ends. If one raises, the block is cancelled and the
    error is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        try:
            yield
        finally:
            while not all(task.done() for task in tasks):  # `asyncio.wait_for` of Python 3.11 can swallow the first
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
