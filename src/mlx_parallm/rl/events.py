"""What training tells whoever listens."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator

from mlx_parallm.core import TrainingEvent

_KEPT = 256
"""Events that wait for one listener; beyond them the oldest are lost."""


class EventHub:
    """Every listener gets every event from its own beginning on, in order. Event loop's thread only."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._closed = False

    def emit(self, kind: str, **data: object) -> None:
        event = TrainingEvent(kind, time.time(), data)
        for listener in tuple(self._listeners):
            listener.tell(event)

    def listen(self) -> Listener:
        """Begins now, not with the first event that is read."""
        listener = Listener()
        if self._closed:
            listener.end()
        self._listeners.add(listener)
        return listener

    def close(self) -> None:
        """Ends every listener once it has read what waits for it."""
        self._closed = True
        for listener in tuple(self._listeners):
            listener.end()


class Listener(AsyncIterator[TrainingEvent]):
    """One reader's events."""

    def __init__(self) -> None:
        self._events: deque[TrainingEvent] = deque(maxlen=_KEPT)
        self._wake = asyncio.Event()
        self._ended = False

    def tell(self, event: TrainingEvent) -> None:
        if not self._ended:
            self._events.append(event)
            self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    async def __anext__(self) -> TrainingEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    async def aclose(self) -> None:
        self.end()
        self._events.clear()
