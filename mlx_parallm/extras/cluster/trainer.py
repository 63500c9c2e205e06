"""Trainer: a node that trains one adapter, and publishes its versions to the other nodes.

    join ─▶ lease of the adapter ─▶ publish versions, read trajectories

TrainerLease: at most one process trains an adapter of a cluster at a time.

    acquire ─▶ fence ─▶ renew every `_RENEWAL_S` ─▶ release
                  └─ goes into every version that is published; a new lease has a higher one

A trainer that stood still and whose lease has passed to another does not notice that at once, but it cannot publish any
more: `Versions.take_over` writes the new fence beside the live version, and a publish with a lower one is refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from mlx_parallm import __version__
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConflictError, StorageError
from mlx_parallm.extras.cluster.cards import Joining, NodeInfo, NodeRole, SharedVersion, VersionState
from mlx_parallm.extras.cluster.connection import Connection, NatsAddress, connect, key_of, stored
from mlx_parallm.extras.cluster.head_client import HeadClient, HeadUnreachableError
from mlx_parallm.extras.cluster.members import Lease, Members
from mlx_parallm.extras.cluster.node import build_of, id_of, running
from mlx_parallm.extras.cluster.publisher import Publisher
from mlx_parallm.extras.cluster.trajectories import Delivery, Trajectories
from mlx_parallm.extras.cluster.versions import Versions

_RENEWAL_S, _RETRY_S = 2.0, 0.25


class TrainerLease:
    """The lease of the adapter `name`.

    Args:
        holder: names the run that trains. A run that was killed and started again takes over its own lease at once.

    Attributes:
        fence: the number of the lease. 0 before `acquire`.
    """

    def __init__(self, connection: Connection, versions: Versions, name: str, holder: str) -> None:
        self._bucket = connection.trainer
        self._versions = versions
        self._name = name
        self._holder = holder
        self._revision = 0
        self.fence = 0

    async def acquire(self, patience_s: float) -> None:
        """Returns when this process has the lease.

        Args:
            patience_s: how long the lease of another trainer is waited for. It ends by itself some seconds after that
                trainer has.

        Raises:
            ConflictError: another trainer has it.
            StorageError: NATS cannot be reached.
        """
        deadline, waits = time.monotonic() + patience_s, False
        while (other := await self._attempt()) is not None:
            if time.monotonic() > deadline:
                raise ConflictError(
                    f"another trainer ({other}) trains {self._name!r} in this cluster; stop it, or train an adapter of "
                    "another name with --default-adapter"
                )
            if not waits:
                _log.info("waiting for the lease of %s, which %s has", self._name, other)
            waits = True
            await asyncio.sleep(_RETRY_S)
        revision, self._revision = self._revision, 0  # if this fails, the next renewal acquires the lease again
        await self._versions.take_over(self._name, self.fence)
        self._revision = revision

    async def run(self) -> None:
        """Renews the lease until it is cancelled, and then gives it up.

        Raises:
            ConflictError: it has passed to another trainer.
        """
        try:
            while True:
                await asyncio.sleep(_RENEWAL_S)
                await self._renew()
        finally:
            with suppress(NatsError, TimeoutError):  # then it ends by itself
                async with asyncio.timeout(_RENEWAL_S):
                    await self._bucket.delete(key_of(self._name), last=self._revision)

    async def _renew(self) -> None:
        try:
            try:
                self._revision = await self._bucket.update(key_of(self._name), self._holder.encode(), self._revision)
            except KeyWrongLastSequenceError:  # it ended while NATS could not be reached
                await self.acquire(patience_s=0)
        except (NatsError, StorageError) as error:  # NATS may be starting again, or have become slow
            _log.debug("the lease of %s was not renewed: %s", self._name, error)

    async def _attempt(self) -> str | None:
        """Takes the lease if it is free or this run's. Returns who else has it, or None."""
        key, holder = key_of(self._name), self._holder.encode()
        async with stored():
            try:
                self.fence = self._revision = await self._bucket.create(key, holder)
                return None
            except KeyWrongLastSequenceError:
                pass
            try:
                entry = await self._bucket.get(key)
                if entry.value != holder:
                    return (entry.value or b"").decode()
                self.fence = self._revision = await self._bucket.update(key, holder, entry.revision)
                return None
            except (KeyNotFoundError, KeyWrongLastSequenceError):  # it has just ended, or was just renewed
                return "another process"


PATIENCE_S = 30.0
"""How long the lease of an adapter is waited for that another trainer has."""
_AGAIN_S = 0.5

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Trainer:
    """The trainer of the adapter `name`, which has its lease.

    Args:
        fingerprint: that of its base model.
        run: names the run, and is the same after a restart.
    """

    def __init__(self, client: HeadClient, connection: Connection, fingerprint: str, name: str, run: str) -> None:
        self.name = name
        self.id = id_of(NodeRole.TRAINER, run)
        self._client = client
        self._versions = Versions(connection)
        self._trajectories = Trajectories(connection)
        self.lease = TrainerLease(connection, self._versions, name, self.id)
        self._presence = Lease(connection, self._describe)
        self._build = build_of(fingerprint)
        self._members = Members(connection, self._build)
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
        return NodeInfo(self.id, NodeRole.TRAINER, "", incarnation=self._incarnation, build=self._build)

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
                await self._patiently(partial(self._publish_once, ref, archive, fence))
                return
            except ConflictError:
                if self.lease.fence == fence:
                    raise
                # the lease had ended and was taken again, so this is still the only trainer

    async def _publish_once(self, ref: AdapterRef, archive: bytes, fence: int) -> None:
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
            node = Trainer(client, connection, fingerprint, name, run)
            async with node.taking_part():
                yield node
