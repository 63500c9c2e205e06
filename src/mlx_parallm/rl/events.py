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

LOST = "events_lost"
"""Kind of the event that stands in a listener's stream for those that it lost; `events`: how many."""


class EventHub:
    """Every listener gets every event from its own beginning on, in order; one that reads too slowly loses the oldest
    and is told how many. Event loop's thread only.
    """

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
        self._events: deque[TrainingEvent] = deque()
        self._lost = 0  # before the first of `_events`
        self._wake = asyncio.Event()
        self._ended = False

    def tell(self, event: TrainingEvent) -> None:
        if self._ended:
            return
        self._events.append(event)
        if len(self._events) > _KEPT:
            self._events.popleft()
            self._lost += 1
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
        if self._lost:
            lost, self._lost = self._lost, 0
            return TrainingEvent(LOST, time.time(), {"events": lost})
        return self._events.popleft()

    async def aclose(self) -> None:
        self.end()
        self._events.clear()
        self._lost = 0
