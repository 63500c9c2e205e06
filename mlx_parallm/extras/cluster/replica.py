"""Replica: one more node that serves the requests of a head.

join ─▶ follow the registry, hold a lease ─▶ NATS silent for REJOIN_S ─▶ join again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mlx_parallm import __version__
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.cluster.cards import Joined, Joining, NodeRole, SharedVersion
from mlx_parallm.extras.cluster.connection import Connection, NatsAddress, NatsUnreachableError, connect
from mlx_parallm.extras.cluster.follower import NodeAdapters
from mlx_parallm.extras.cluster.head_client import HeadClient, HeadUnreachableError
from mlx_parallm.extras.cluster.node import Node, running

REJOIN_S = 3.0
"""How long NATS may be unreachable before the head is asked where it is now."""
_AGAIN_S, _REFUSED_S = 0.5, 10.0

_log = logging.getLogger(__name__)


class Replica(Node):
    """A node that serves requests which the head sends it.

    Args:
        fingerprint: that of its base model, which the head has accepted.
    """

    def __init__(self, client: HeadClient, fingerprint: str, token: str, adapters: NodeAdapters, folder: Path) -> None:
        super().__init__(NodeRole.REPLICA, fingerprint, token, adapters, folder / "unpacked")
        self._client = client
        self._fingerprint = fingerprint

    async def fetch(self, version: SharedVersion) -> bytes:
        """See `Node.fetch`."""
        return await self._client.adapter(version)

    async def run(self) -> None:
        """Takes part in the cluster until it is cancelled. While the head cannot be reached, this node serves its own
        clients, and asks again."""
        await self._serving.wait()
        while True:
            try:
                await asyncio.to_thread(self.locate)  # it may ask for the address of the head's name, and wait
                joined = await self._client.join(Joining(self.role, self.url, self._fingerprint, __version__))
                async with (
                    connect(NatsAddress(joined.nats_url, joined.nats_token), self.id) as connection,
                    self.taking_part(connection),
                ):
                    await _silent(connection)
            except (HeadUnreachableError, NatsUnreachableError) as error:
                _log.warning("%s", error)
                await asyncio.sleep(_AGAIN_S)
            except ConfigError as error:
                _log.error("%s", error)
                await asyncio.sleep(_REFUSED_S)


@asynccontextmanager
async def replica(
    address: str, fingerprint: str, token: str, adapters: NodeAdapters, folder: Path
) -> AsyncIterator[Replica]:
    """Runs a replica of the head at `address` until the block ends. Its `folder` is its own."""
    async with HeadClient(address, token) as client:
        node = Replica(client, fingerprint, token, adapters, folder)
        async with running(node.run()):
            yield node


async def ask_head(address: str, token: str, url: str, fingerprint: str | None) -> Joined:
    """What the head says to a node before it has loaded its base model.

    Raises:
        HeadUnreachableError: no head answers.
        ConfigError: the head refuses the token, or the base model.
    """
    async with HeadClient(address, token) as client:
        return await client.join(Joining(NodeRole.REPLICA, url, fingerprint, __version__))


async def fetch_base(address: str, token: str, joined: Joined, folder: Path) -> None:
    """Fetches the files of the cluster's base model into `folder`; those that are there already stay."""
    async with HeadClient(address, token) as client:
        await client.fetch_base(joined.base.files, folder)


async def _silent(connection: Connection) -> None:
    """Returns when NATS has been unreachable for `REJOIN_S`."""
    silent = 0.0
    while silent < REJOIN_S:
        await asyncio.sleep(_AGAIN_S)
        silent = 0.0 if connection.connected else silent + _AGAIN_S
