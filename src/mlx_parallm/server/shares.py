"""Shares of a scarce resource: no client takes all of it, and nobody waits for it without end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from mlx_parallm.errors import OverloadedError


def client_of(scope: Scope) -> str:
    """Who asks: the client's address. A server has one API key at most, so a key tells nobody apart."""
    client = scope.get("client")
    return client[0] if client else ""


class ClientShare:
    """`places` for all clients together, and at most `each` of them for one client. Event loop only.

    A client waits for its own places first, so at most `each` of its requests are in the line that all clients share.

    Args:
        patience_s: longest wait for a place.
        busy: what a client is told that has waited so long.
    """

    def __init__(self, places: int, each: int, patience_s: float, busy: str) -> None:
        self._places = asyncio.Semaphore(places)
        self._each = each
        self._patience_s = patience_s
        self._busy = busy
        self._own: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Holds one place while the block runs. Raises OverloadedError: none was free for too long."""
        own = self._own.setdefault(client, asyncio.Semaphore(self._each))
        self._users[client] += 1
        try:
            await self._take(own)
            try:
                yield
            finally:
                self._places.release()
                own.release()
        finally:
            self._forget(client)

    async def _take(self, own: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await own.acquire()
                try:
                    await self._places.acquire()
                except BaseException:
                    own.release()
                    raise
        except TimeoutError:
            raise OverloadedError(self._busy) from None

    def _forget(self, client: str) -> None:
        self._users[client] -= 1
        if not self._users[client]:
            del self._users[client], self._own[client]
