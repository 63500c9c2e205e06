"""Trainer: a node that trains one adapter. Publisher: makes its versions live on every node.

join ─▶ lease of the adapter ─▶ publish versions, read trajectories
                                   └─ upload ─▶ staged ─▶ every node that serves fetches it and says that it holds it
                                                                     └─▶ compare-and-set of the live version
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mlx_parallm import __version__
from mlx_parallm.cluster.connection import Connection, NatsAddress, connect
from mlx_parallm.cluster.head_client import HeadClient, HeadUnreachableError
from mlx_parallm.cluster.members import Lease, Members
from mlx_parallm.cluster.node import id_of, running
from mlx_parallm.cluster.trainer_lease import TrainerLease
from mlx_parallm.cluster.trajectories import Delivery, Trajectories
from mlx_parallm.cluster.versions import LiveVersion, Versions
from mlx_parallm.core import AdapterRef, Joining, NodeInfo, NodeRole, SharedVersion, VersionState
from mlx_parallm.errors import ConflictError, StorageError

_PATIENCE_S, _CHECK_S = 10.0, 0.01


class Publisher:
    """Publishes from this node.

    Args:
        patience_s: how long a node that serves may take to hold a version before the others go on without it.
    """

    def __init__(
        self, client: HeadClient, versions: Versions, members: Members, patience_s: float = _PATIENCE_S
    ) -> None:
        self._client = client
        self._versions = versions
        self._members = members
        self._patience_s = patience_s

    async def publish(self, ref: AdapterRef, archive: bytes, fence: int = 0) -> LiveVersion:
        """Publishes a version. `archive`: see `cluster.archive.pack`. `fence`: the number of the trainer's lease.

        Raises:
            HeadUnreachableError, StorageError: the head or NATS does not answer. Doing so again is safe.
            ConflictError: another version went live meanwhile, or the lease is lost.
        """
        live = await self._versions.live(ref.name)
        if live is not None and live.version.ref == ref:
            return live  # an earlier attempt came to its end after all
        return await self.make_live(await self._client.put_adapter(ref, archive, fence), live)

    async def make_live(self, version: SharedVersion, after: LiveVersion | None) -> LiveVersion:
        """Makes a staged version live when the nodes hold it. Raises what `Versions.go_live` does."""
        await self._held(version.ref)
        return await self._versions.go_live(version, after)

    async def _held(self, ref: AdapterRef) -> None:
        """Returns when every node that serves holds the version, or after `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        while missing := self._missing(ref):
            if time.monotonic() > deadline:
                _log.warning("%s goes live although it is missing on %s", ref, ", ".join(missing))
                return
            await asyncio.sleep(_CHECK_S)

    def _missing(self, ref: AdapterRef) -> list[str]:
        serving = [member.info for member in self._members.present() if member.info.ready]
        return [info.id for info in serving if str(ref) not in info.holds] if serving else ["any node"]


PATIENCE_S = 30.0
"""How long the lease of an adapter is waited for that another trainer has."""
_AGAIN_S = 0.5

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Trainer:
    """The trainer of the adapter `name`, which has its lease.

    Args:
        run: names the run, and is the same after a restart.
    """

    def __init__(self, client: HeadClient, connection: Connection, name: str, run: str) -> None:
        self.name = name
        self.id = id_of(NodeRole.TRAINER, run)
        self._client = client
        self._versions = Versions(connection)
        self._members = Members(connection)
        self._trajectories = Trajectories(connection)
        self.lease = TrainerLease(connection, self._versions, name, self.id)
        self._presence = Lease(connection, self._describe)
        self._incarnation = secrets.token_hex(8)

    @asynccontextmanager
    async def taking_part(self) -> AsyncIterator[None]:
        """Gets the lease, and renews it until the block ends, which is cancelled if the lease is lost.

        Raises:
            ConflictError: another trainer has the lease.
        """
        await self.lease.acquire(PATIENCE_S)
        async with running(self._members.run(), self._presence.run(), self.lease.run()):
            yield

    def _describe(self) -> NodeInfo:
        return NodeInfo(self.id, NodeRole.TRAINER, "", incarnation=self._incarnation)

    # -- versions --------------------------------------------------------------------------------

    async def registry(self) -> VersionState:
        """The shared versions as they are now. Waits while NATS does not answer."""
        return await self._versions.now()

    async def archive(self, version: SharedVersion) -> bytes:
        """See `HeadClient.adapter`. Waits while the head does not answer."""
        return await self._patiently(lambda: self._client.adapter(version))

    async def publish(self, ref: AdapterRef, archive: bytes) -> None:
        """Makes a version live in the cluster. While the head or NATS does not answer, waits for it.

        One that an earlier process of this run has staged is not sent again: an update that was made again after a
        crash is the same one, even if its bytes are not.

        Raises:
            ConflictError: the lease is lost.
        """
        while True:
            fence = self.lease.fence
            try:
                await self._patiently(partial(self._published, ref, archive, fence))
                return
            except ConflictError:
                if self.lease.fence == fence:
                    raise
                # the lease had ended and was taken again, so this is still the only trainer

    async def _published(self, ref: AdapterRef, archive: bytes, fence: int) -> None:
        publisher = Publisher(self._client, self._versions, self._members)
        staged = (await self._versions.now()).staged.get(ref)
        if staged is None:
            await publisher.publish(ref, archive, fence)
        elif (live := await self._versions.live(ref.name)) is None or live.version.ref != ref:
            await publisher.make_live(replace(staged, fence=fence), live)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, when the head and NATS answer."""
        warned = False
        while True:
            try:
                return await ask()
            except (HeadUnreachableError, StorageError) as error:
                if not warned:
                    _log.warning("%s; trying again until it answers", error)
                warned = True
            await asyncio.sleep(_AGAIN_S)

    # -- trajectories ----------------------------------------------------------------------------

    def deliveries(self) -> AsyncGenerator[Delivery, None]:
        """See `Trajectories.read`."""
        return self._trajectories.read(self.name, self.lease.fence)


@asynccontextmanager
async def trainer(address: str, token: str, fingerprint: str, name: str, run: str) -> AsyncIterator[Trainer]:
    """Runs a trainer of the head at `address` until the block ends.

    Raises:
        HeadUnreachableError: no head answers.
        ConfigError: the head refuses this node.
        ConflictError: another trainer has the lease of the adapter.
    """
    async with HeadClient(address, token) as client:
        joined = await client.join(Joining(NodeRole.TRAINER, "", fingerprint, __version__))
        async with connect(NatsAddress(joined.nats_url, joined.nats_token), NodeRole.TRAINER.value) as connection:
            node = Trainer(client, connection, name, run)
            async with node.taking_part():
                yield node
