"""Training events: the stream that clients listen to, and those that are kept for people to look at."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.rl.status import TrainingEvent, TrainingHistory

_MAX_QUEUED = 256
"""Events that may wait for one listener, and that are kept for those who come back. Older ones are lost."""

LOST = "events_lost"
"""Kind of the event that replaces lost events in a listener's stream; see `TrainingEvent`."""


class Emit(Protocol):
    """Sends an event to all listeners; the kinds are those of `TrainingEvent`."""

    def __call__(self, kind: str, **data: object) -> None: ...


class EventHub:
    """Sends every event to every listener, in order. A slow listener loses its oldest events, and is told how many.

    The id of an event is the hub's own id and the event's number, so that an id of an earlier start is known as such.
    Event loop's thread only.
    """

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._sinks: list[Callable[[TrainingEvent], None]] = []
        self._closed = False
        self._id = f"{time.time_ns():x}"
        self._count = 0
        self._newest: deque[TrainingEvent] = deque(maxlen=_MAX_QUEUED)

    def emit(self, kind: str, **data: object) -> None:
        self._count += 1
        event = TrainingEvent(kind, time.time(), data, f"{self._id}-{self._count}")
        self._newest.append(event)
        for sink in self._sinks:
            sink(event)
        for listener in tuple(self._listeners):
            listener.put(event)

    def add_sink(self, sink: Callable[[TrainingEvent], None]) -> None:
        """Calls `sink` with every event from now on. It must neither raise nor block."""
        self._sinks.append(sink)

    def listen(self, after: str = "", reader: Reader = EVERYTHING) -> Listener:
        """A listener that gets the events that `reader` sees from this call on. `after`: see
        `TrainingService.events`."""
        listener = Listener(*self._since(after), reader)
        if self._closed:
            listener.end()
        self._listeners.add(listener)
        return listener

    def _since(self, last: str) -> tuple[list[TrainingEvent], int | None]:
        """The events after the one with this id that are kept, and how many before them are lost; None: unknown."""
        hub, _, number = last.partition("-")
        if not last:
            return [], 0
        if hub != self._id or not (number.isascii() and number.isdecimal()):
            return list(self._newest), None
        missed = max(0, self._count - int(number))
        kept = list(self._newest)[max(0, len(self._newest) - missed) :]
        return kept, missed - len(kept)

    @property
    def last_id(self) -> str:
        """The id of the newest event; the next one has a later id even if there is none yet."""
        return f"{self._id}-{self._count}"

    def close(self) -> None:
        """Ends every listener once it has read its queued events."""
        self._closed = True
        for listener in tuple(self._listeners):
            listener.end()


class Listener(AsyncIterator[TrainingEvent]):
    """The events that one reader sees, which begin with those that it has missed.

    Args:
        lost: how many were lost before them; None if that is not known.
    """

    def __init__(self, missed: Iterable[TrainingEvent] = (), lost: int | None = 0, reader: Reader = EVERYTHING) -> None:
        self._reader = reader
        self._events = deque(seen for event in missed if (seen := event.seen_by(reader)))
        self._lost = lost  # events lost before the first of `_events`
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, event: TrainingEvent) -> None:
        seen = event.seen_by(self._reader)
        if self._ended or seen is None:
            return
        self._events.append(seen)
        if len(self._events) > _MAX_QUEUED:
            self._events.popleft()
            self._lost = None if self._lost is None else self._lost + 1
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def __anext__(self) -> TrainingEvent:
        while not self._events and self._lost == 0:
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        if self._lost != 0:
            lost, self._lost = self._lost, 0
            return TrainingEvent(LOST, time.time(), {"events": lost})
        return self._events.popleft()

    async def aclose(self) -> None:
        self.end()
        self._events.clear()
        self._lost = 0


# ---- what has happened since the run began -------------------------------------------------------

KINDS = frozenset(
    {
        "started",
        "stopped",
        "paused",
        "placeholder_logprobs",
        "resumed",
        "update",
        "held",
        "skipped",
        "evaluation",
        "evaluation_failed",
        "divergence",
        "plateau",
        "plateau_ended",
        "rollback",
        "checkpoint",
        "averaged",
        "comparison_started",
        "comparison_ended",
        "lesson_started",
        "lesson_ended",
    }
)
"""The events that are kept. Those of single trajectories are too many."""

MAX_EVENTS = 2000
"""Events that are kept of each adapter. Older ones are forgotten."""


class EventHistory:
    """Keeps the newest events of each adapter. Event loop's thread only."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._max = max_events
        self._kept: defaultdict[str, deque[TrainingEvent]] = defaultdict(deque)
        self._forgotten: set[str] = set()

    def on_event(self, event: TrainingEvent) -> None:
        if event.kind in KINDS:
            for name in _adapters_of(event):
                self._kept[name].append(event)
                self._trim(name)

    def restore(self, earlier: Iterable[TrainingEvent]) -> None:
        """Puts the events of earlier processes, oldest first, before those of this one. Updates that this one has made
        again after a crash are not repeated."""
        made_again = {_identity(event) for kept in self._kept.values() for event in kept}
        for event in reversed([event for event in earlier if _identity(event) not in made_again]):
            self._kept[str(event.data["adapter"])].appendleft(event)
        for name in self._kept:
            self._trim(name)

    def of(self, adapter: str, limit: int, last_event_id: str) -> TrainingHistory:
        """The newest events of an adapter. `last_event_id`: of the newest event of all adapters."""
        kept = tuple(self._kept[adapter]) if adapter in self._kept else ()
        truncated = adapter in self._forgotten or len(kept) > limit
        return TrainingHistory(adapter, kept[max(0, len(kept) - limit) :], truncated, last_event_id)

    def forget(self, adapter: str) -> None:
        """Forgets the events of an adapter."""
        self._kept.pop(adapter, None)
        self._forgotten.discard(adapter)

    def _trim(self, adapter: str) -> None:
        kept = self._kept[adapter]
        while len(kept) > self._max:
            kept.popleft()
            self._forgotten.add(adapter)


def _adapters_of(event: TrainingEvent) -> set[str]:
    """The adapters that an event concerns: that of an average, and those that it is of."""
    members = event.data["adapters"] if event.kind == "averaged" else ()
    return {str(event.data["adapter"]), *(member.partition("@")[0] for member in members)}


def _identity(event: TrainingEvent) -> tuple[object, ...]:
    return event.kind, event.data.get("version"), event.data.get("step")
