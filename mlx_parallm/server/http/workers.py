"""Worker threads of the HTTP server, in three pools, so that one kind of work cannot block another.

- small: work of a few milliseconds. Most requests need no other pool.
- large: parsing, rendering, tokenising and writing of long texts, in two threads.
- grammars: requests whose grammar is compiled, with a limit for each client.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from mlx_parallm.errors import OverloadedError
from mlx_parallm.grammar.trial import CHILDREN

T = TypeVar("T")

SMALL_BYTES = 64 * 1024
"""A body up to this size is small: all work on it takes a few milliseconds."""

_SMALL_THREADS, _LARGE_THREADS = 40, 2
_GRAMMAR_TIMEOUT_S = 10.0
_LARGE_BODIES, _LARGE_BODIES_PER_CLIENT = 16, 8
_LARGE_BODY_BYTES_PER_S = 16 * 2**20
"""Rate at which the large bodies of all clients together are read."""
_MIN_SLEEP_S = 0.01


class PerClientSemaphore:
    """A semaphore with `total` places, of which one client may hold at most `per_client`. Used on the event loop's
    thread only.

    A client waits for one of its own places first, so at most `per_client` of its requests are in the common queue.

    Args:
        timeout_s: longest wait for a place, in seconds.
        busy: message of the error after that wait.
    """

    def __init__(self, total: int, per_client: int, timeout_s: float, busy: str) -> None:
        self._places = asyncio.Semaphore(total)
        self._per_client = per_client
        self._timeout_s = timeout_s
        self._busy = busy
        self._own: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Holds one place while the block runs. Raises OverloadedError if none becomes free in time."""
        own = self._own.setdefault(client, asyncio.Semaphore(self._per_client))
        self._users[client] += 1
        try:
            await self._acquire(own)
            try:
                yield
            finally:
                self._places.release()
                own.release()
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client], self._own[client]

    async def _acquire(self, own: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await own.acquire()
                try:
                    await self._places.acquire()
                except BaseException:
                    own.release()
                    raise
        except TimeoutError:
            raise OverloadedError(self._busy) from None


class ArrivingBodies:
    """Bounds the bytes of large bodies from their arrival until they are parsed, and the rate at which they are read. A
    client that sends slowly holds up nobody else, because it holds only the bytes that it has sent. Used on the event
    loop's thread only.

    Args:
        most: bytes of all clients together. One client may hold half of what the others leave free, so there is always
            some room for the next one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self._next_read_at: dict[str, float] = {}  # event loop time, by client

    @contextmanager
    def hold(self, client: str) -> Iterator[Callable[[int], Awaitable[None]]]:
        """Gives a function to be called with the number of bytes of each chunk, and awaited before the next one is
        read. It raises OverloadedError if there is no room for the chunk. The bytes count until the block ends."""
        count = 0

        async def add(size: int) -> None:
            nonlocal count
            others = self._held.total() - self._held[client]
            if self._held[client] + size > (self._most - others) // 2:
                raise OverloadedError("Other large bodies are being read; try again.")
            self._held[client] += size
            count += size
            await self._pace(client, size)

        try:
            yield add
        finally:
            self._held[client] -= count
            if not self._held[client]:
                del self._held[client]
                self._next_read_at.pop(client, None)

    async def _pace(self, client: str, size: int) -> None:
        """Waits, after `size` bytes were read, until more may be read. The clients that wait now share the rate
        equally, so the number of connections of one client does not slow down the others. Without a limit, bodies sent
        over loopback and then refused would take most of a core from the event loop and the device thread."""
        now = asyncio.get_running_loop().time()
        sharing = 1 + sum(at > now for other, at in self._next_read_at.items() if other != client)
        own = max(self._next_read_at.get(client, now), now) + size * sharing / _LARGE_BODY_BYTES_PER_S
        self._next_read_at[client] = own
        if (sleep := own - now) > _MIN_SLEEP_S:
            await asyncio.sleep(sleep)


class Workers:
    """The thread pools and the limits for large bodies. `arriving` bounds what is read; a request holds a place of
    `large_bodies` while its body, which has arrived, is parsed. Used on the event loop's thread only.

    Args:
        body_timeout_s: longest time in seconds that a large body waits while others are parsed.
        max_body_bytes: the largest body.
    """

    def __init__(self, body_timeout_s: float, max_body_bytes: int) -> None:
        self._small = CapacityLimiter(_SMALL_THREADS)
        self._large = CapacityLimiter(_LARGE_THREADS)
        self._compiling = CapacityLimiter(CHILDREN)
        busy = "Other grammars are being compiled; try again."
        self._grammars = PerClientSemaphore(CHILDREN, max(1, CHILDREN // 2), _GRAMMAR_TIMEOUT_S, busy)
        busy = "Other large bodies are being parsed; try again."
        self.large_bodies = PerClientSemaphore(_LARGE_BODIES, _LARGE_BODIES_PER_CLIENT, body_timeout_s, busy)
        self.arriving = ArrivingBodies(_LARGE_BODIES * max_body_bytes)

    async def run(self, size: int, call: Callable[[], T]) -> T:
        """Runs `call` in a thread of the small or the large pool. `size`: the number of bytes that it works on."""
        return await to_thread.run_sync(call, limiter=self._small if size <= SMALL_BYTES else self._large)

    async def compile(self, client: str, call: Callable[[], T]) -> T:
        """Runs `call`, which compiles a grammar. Raises OverloadedError if the client waited too long for a place."""
        async with self._grammars.hold(client):
            return await to_thread.run_sync(call, limiter=self._compiling)
