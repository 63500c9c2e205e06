"""Decides which requests the server accepts: the bounded queue, sleep, and the stages of a shutdown.

serving → draining (requests under way may finish) → expired (they are ended with an error)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from mlx_parallm.core.engine import EngineClient
from mlx_parallm.errors import InvalidRequestError, OverloadedError
from mlx_parallm.server.access.shares import has_room
from mlx_parallm.server.errors import DrainingError

T = TypeVar("T")

_SLEEP_CHECK_S = 0.05


class Lifecycle:
    """The stages of a shutdown. Used on the event loop's thread, or from a signal handler.

    Draining: requests under way continue, also streamed answers; new generation requests and `/ready` get 503; the
    streams of `/v1/training/events`, which never end by themselves, are closed. Expired: the time limit is over, and
    requests under way get an error.
    """

    def __init__(self) -> None:
        self.drain_begun = asyncio.Event()
        self.expired = asyncio.Event()
        self._work: set[asyncio.Task[Any]] = set()

    @property
    def working(self) -> bool:
        """Whether work begun by `run_to_end` has not ended yet."""
        return bool(self._work)

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`, which runs to its end even if the client disconnects meanwhile.

        Raises:
            DrainingError: the server is draining; `work` was not started.
        """
        if self.drain_begun.is_set():
            work.close()
            raise DrainingError("draining")
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return await asyncio.shield(task)

    def begin_drain(self) -> None:
        self.drain_begun.set()

    def expire(self) -> None:
        self.drain_begun.set()
        self.expired.set()


class SequenceGate:
    """Limits the number of sequences of all requests under way. A request counts from before it is tokenised to the
    last byte of its answer. Used on the event loop's thread only, so that no other request comes between the check and
    the count.

    One of several keys holds at most its share of the places; see `access.shares`.

    Invariant: 0 <= held <= limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._of_keys: Counter[str] = Counter()

    @contextmanager
    def reserve(self, sequences: int, key: str | None = None) -> Iterator[None]:
        """Holds `sequences` places while the block runs.

        Args:
            key: the name of the key whose places they are; None if there are no other keys.

        Raises:
            InvalidRequestError: so many would not be free if nobody else held any.
            OverloadedError: fewer are free, or the key would hold too many of them.
        """
        if not has_room(self.limit, 0, None if key is None else 0, sequences):
            raise InvalidRequestError(
                f"This request needs {sequences} places in the queue, and it has {self.limit}, not all of which one "
                "key may hold. Send fewer prompts at a time, or ask for fewer answers.",
                param="n",
            )
        if self.held + sequences > self.limit:
            raise OverloadedError(
                f"The queue is full: {self.held} of {self.limit} sequences are held and this request needs "
                f"{sequences}. Try again shortly."
            )
        own = None if key is None else self._of_keys[key]
        if not has_room(self.limit, self.held, own, sequences):
            raise OverloadedError(
                f"This key holds {own} of {self.limit} places in the queue, and the others are kept for other keys. "
                "Try again shortly."
            )
        self.held += sequences
        self._of_keys[key or ""] += sequences
        try:
            yield
        finally:
            self.held -= sequences
            self._of_keys[key or ""] -= sequences
            self._of_keys = +self._of_keys  # drops those that hold none


class SleepSwitch:
    """Puts the server to sleep and wakes it. While `asleep`, generation requests are refused. Used on the event loop's
    thread only."""

    def __init__(self, engine: EngineClient, gate: SequenceGate) -> None:
        self.asleep = False
        self._engine = engine
        self._gate = gate
        self._pending: set[asyncio.Task[None]] = set()

    async def sleep(self, free_adapters: bool) -> None:
        """Refuses requests at once, waits for those under way, then frees the KV cache, and also the adapter slots if
        `free_adapters`. Returns when that is done, or when `wake` was called first.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        self.asleep = True
        task = asyncio.create_task(self._free_memory(free_adapters))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def wake(self) -> None:
        """Accepts requests again. The first one that needs the memory allocates it."""
        self.asleep = False
        for task in self._pending:
            task.cancel()

    async def _free_memory(self, free_adapters: bool) -> None:
        while self._gate.held:  # includes requests that have not reached the engine yet
            await asyncio.sleep(_SLEEP_CHECK_S)
        await self._engine.sleep(free_adapters)


@asynccontextmanager
async def while_connected(receive: Receive, stop: asyncio.Event) -> AsyncIterator[None]:
    """Cancels the block when the client disconnects or `stop` is set. The request's body must have been read before.

    Raises:
        ClientDisconnect: the client closed the connection.
        DrainingError: `stop` was set.
    """
    causes: list[Exception] = []

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel(ClientDisconnect())

    async def stopped() -> None:
        await stop.wait()
        cancel(DrainingError("draining"))

    def cancel(cause: Exception) -> None:
        if not causes:
            causes.append(cause)
            block.reschedule(0)  # a time in the past

    try:
        async with asyncio.timeout(None) as block:
            watchers = [asyncio.create_task(watch()) for watch in (disconnected, stopped)]
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
    except TimeoutError:
        if block.expired():
            raise causes[0] from None
        raise
