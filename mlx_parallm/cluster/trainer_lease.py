"""TrainerLease: at most one process trains an adapter of a cluster at a time.

acquire ─▶ fence ─▶ renew every `_RENEWAL_S` ─▶ release
              └─ goes into every version that is published; a new lease has a higher one

A trainer that stood still and whose lease has passed to another does not notice that at once, but it cannot publish any
more: `Versions.take_over` writes the new fence beside the live version, and a publish with a lower one is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from mlx_parallm.cluster.connection import Connection, key_of, stored
from mlx_parallm.cluster.versions import Versions
from mlx_parallm.errors import ConflictError

_RENEWAL_S, _AGAIN_S = 2.0, 0.25

_log = logging.getLogger(__name__)


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
            await asyncio.sleep(_AGAIN_S)
        await self._versions.take_over(self._name, self.fence)

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
                await asyncio.wait_for(self._bucket.delete(key_of(self._name), last=self._revision), _RENEWAL_S)

    async def _renew(self) -> None:
        try:
            self._revision = await self._bucket.update(key_of(self._name), self._holder.encode(), self._revision)
        except KeyWrongLastSequenceError:  # it ended while NATS could not be reached
            await self.acquire(patience_s=0)
        except NatsError as error:  # NATS may be starting again
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
