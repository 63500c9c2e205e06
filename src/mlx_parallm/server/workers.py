"""Worker threads of the HTTP face, in pools of their own, so that one kind of work cannot keep another waiting.

- small: what takes milliseconds. Most requests need no other pool.
- large: parsing, rendering, tokenising and wording of what is long, two at a time.
- grammars: requests whose grammar is compiled, with a share for each client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from mlx_parallm.grammar.trial import CHILDREN
from mlx_parallm.server.shares import ClientShare

T = TypeVar("T")

SMALL_BYTES = 64 * 1024
"""A body up to this size is small: everything done with it takes a few milliseconds."""

_SMALL_THREADS, _LARGE_THREADS = 40, 2
_GRAMMAR_PATIENCE_S = 10.0
_BODIES, _BODIES_EACH = 16, 8
_INTAKE_BYTES_S = 16 * 2**20
"""Bytes of large bodies that are read in a second, of all clients together."""
_LEAST_PAUSE_S = 0.01


class Workers:
    """Used on the event loop's thread only.

    Args:
        body_patience_s: longest wait of a large body until others have been read.
    """

    def __init__(self, body_patience_s: float) -> None:
        self._small = CapacityLimiter(_SMALL_THREADS)
        self._large = CapacityLimiter(_LARGE_THREADS)
        self._compiling = CapacityLimiter(CHILDREN)
        busy = "Other grammars are being compiled; try again."
        self._grammars = ClientShare(CHILDREN, max(1, CHILDREN // 2), _GRAMMAR_PATIENCE_S, busy)
        busy = "Other large bodies are being read; try again."
        self._bodies = ClientShare(_BODIES, _BODIES_EACH, body_patience_s, busy)
        self._intake_free_at = 0.0  # by the event loop's clock

    async def run(self, size: int, call: Callable[[], T]) -> T:
        """Runs `call`, whose work grows with `size` in bytes, in a thread of its pool."""
        return await to_thread.run_sync(call, limiter=self._small if size <= SMALL_BYTES else self._large)

    async def compile(self, client: str, call: Callable[[], T]) -> T:
        """Runs `call`, which compiles a grammar. Raises OverloadedError: the client's share was taken for too long."""
        async with self._grammars.place(client):
            return await to_thread.run_sync(call, limiter=self._compiling)

    @asynccontextmanager
    async def large_body(self, client: str) -> AsyncIterator[None]:
        """Held while a large body is in memory. Raises OverloadedError."""
        async with self._bodies.place(client):
            yield

    async def pace(self, count: int) -> None:
        """Waits until `count` more bytes of large bodies may be read. As fast as loopback brings them, bodies that are
        refused would still take most of a core from the event loop and the device thread."""
        now = asyncio.get_running_loop().time()
        self._intake_free_at = max(self._intake_free_at, now) + count / _INTAKE_BYTES_S
        if (pause := self._intake_free_at - now) > _LEAST_PAUSE_S:
            await asyncio.sleep(pause)
