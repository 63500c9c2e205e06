"""Who is in the cluster: each node renews a lease on its own entry, and follows the entries of all others.

A node whose entry has not been renewed for `LEASE_S` seconds is lost. Each node measures this on its own clock, while
it hears renewals of any node, its own among them. Otherwise NATS is away or stands still, and nobody counts as lost.

A node of another build is left out. `Head.join` refuses it, but a node that is connected does not join again when the
head is started again with another version or base model within `replica.REJOIN_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from nats.errors import Error as NatsError

from mlx_parallm.extras.cluster.cards import Member, NodeInfo
from mlx_parallm.extras.cluster.connection import LEASE_S, Change, Connection
from mlx_parallm.extras.cluster.records import from_json, to_json

RENEWAL_S = 1.0
_SWEEP_S = 0.25
_QUIET_S = 2 * RENEWAL_S
"""After this time without a renewal of any node, NATS stands still. It is less than a lease."""
_RETURN_S = 12.0
"""How long a node may take to connect to NATS again, in addition to its lease. An attempt that began while NATS stood
still takes nats-py 10 s."""

_log = logging.getLogger(__name__)


class Lease:
    """This node's own entry.

    Args:
        describe: what the node says of itself now.
    """

    def __init__(self, connection: Connection, describe: Callable[[], NodeInfo]) -> None:
        self._connection = connection
        self._describe = describe
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Renews the entry at once, because what it says has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Renews the entry until it is cancelled, then removes it, so that the others need not wait. A node that leaves
        because it has lost NATS comes back with the requests that it has: its entry stays."""
        try:
            while True:
                self._changed.clear()
                await self._renew()
                with suppress(TimeoutError):
                    async with asyncio.timeout(RENEWAL_S):
                        await self._changed.wait()
        finally:
            if self._connection.connected:
                with suppress(NatsError, TimeoutError):  # then the entry expires by itself
                    async with asyncio.timeout(RENEWAL_S):
                        await self._connection.nodes.delete(self._describe().id)

    async def _renew(self) -> None:
        info = self._describe()
        try:
            await self._connection.nodes.put(info.id, to_json(info))
        except NatsError as error:  # NATS may be starting again; the next renewal follows in a second
            _log.debug("the lease of %s was not renewed: %s", info.id, error)


class Members:
    """All nodes that are present, as this node sees them. Used on the event loop's thread.

    `lost_total`: how many were lost without a word. `build`: that of this node.
    """

    def __init__(self, connection: Connection, build: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._build = build
        self._clock = clock
        self._left_out: set[str] = set()  # incarnations
        self._members: dict[str, Member] = {}
        self._heard_at = clock()
        self.lost_total = 0

    def present(self) -> tuple[Member, ...]:
        """The nodes that are present, sorted by id."""
        return tuple(self._members[node] for node in sorted(self._members))

    async def run(self) -> None:
        """Follows the entries until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep())
            async for change in self._connection.follow(self._connection.nodes):
                if change is not None:
                    self.note(change)

    def note(self, change: Change) -> None:
        """Takes in one change of an entry."""
        self._heard_at = self._clock()
        if change.value is None:
            self._drop(change.key)
        elif (info := from_json(NodeInfo, change.value)) is None:
            return
        elif info.build != self._build:
            self._leave_out(info)
        else:
            known = self._members.get(info.id)
            if known is None or known.info.incarnation != info.incarnation:
                self._drop(info.id)
                self._members[info.id] = Member(info, self._clock())
                _log.info("node %s is here, at %s", info.id, info.url or "no address")
            else:
                known.info, known.seen_at = info, max(known.seen_at, self._clock())

    def sweep(self) -> None:
        """Drops the nodes that have not renewed their entry in time, if renewals of others arrive."""
        if self._connection.connected and self._clock() - self._heard_at < _QUIET_S:
            self.drop_silent()
        else:
            self.extend_all()

    def drop_silent(self) -> None:
        """Drops the nodes that have not renewed their entry in time."""
        limit = self._clock() - LEASE_S
        for node in [node for node, member in self._members.items() if member.seen_at < limit]:
            _log.warning("node %s is lost: it has said nothing for %g s", node, LEASE_S)
            self.lost_total += 1
            self._drop(node)

    def extend_all(self) -> None:
        """Gives every node a lease from now on, and the time to connect again. Called while nobody can be heard."""
        for member in self._members.values():
            member.seen_at = self._clock() + _RETURN_S

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def _leave_out(self, info: NodeInfo) -> None:
        self._drop(info.id)
        if info.incarnation not in self._left_out:
            self._left_out.add(info.incarnation)
            _log.error(
                "node %s is left out: it has the version and base model %s, and this node %s; start it again with the "
                "same",
                info.id,
                info.build or "of an earlier release",
                self._build,
            )

    def _drop(self, node: str) -> None:
        if (member := self._members.pop(node, None)) is not None:
            member.lost.set()
