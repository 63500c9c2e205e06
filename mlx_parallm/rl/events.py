"""Training events: the stream that clients listen to. Also the reports of updates to it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.core import EVERYTHING, AdapterRef, Reader, TrainingEvent, UpdateReport
from mlx_parallm.train.data import UpdateOutcome

_MAX_QUEUED = 256
"""Events that may wait for one listener, and that are kept for those who come back. Older ones are lost."""

_MINUTE = 60.0

EVALUATION = "evaluation"
"""The code of a `Refusal` by an evaluation."""

LOST = "events_lost"
"""Kind of the event that replaces lost events in a listener's stream; see `core.TrainingEvent`."""

_log = logging.getLogger(__name__)


class Emit(Protocol):
    """Sends an event to all listeners; the kinds are those of `core.TrainingEvent`."""

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version does not go live. `code`: EVALUATION, or the signal that diverged. `reason`: the same in words."""

    code: str
    reason: str


class UpdateReporter:
    """Makes the reports of one adapter's updates, counts them, and emits each as an event.

    Attributes:
        step, metrics: of the last update that changed the policy.
        updates: updates that changed the policy.
        last_update: time of the last of them, in Unix seconds.
        skips: updates that were skipped or held, by reason.
    """

    def __init__(self, name: str, emit: Emit) -> None:
        self.step = 0
        self.metrics: Mapping[str, float] = {}
        self.updates = 0
        self.last_update: float | None = None
        self.skips: Counter[str] = Counter()
        self._name = name
        self._emit = emit
        self._times: deque[float] = deque()  # of the updates in the last minute, monotonic

    @property
    def updates_per_second(self) -> float:
        """Updates that changed the policy, per second over the last minute."""
        since = time.monotonic() - _MINUTE
        return sum(at >= since for at in self._times) / _MINUTE

    def updated(self, status: str, live: AdapterRef | None, outcome: UpdateOutcome) -> UpdateReport:
        """Reports an update that changed the policy. `status`: published or trained. `live`: the live version now."""
        self.step, self.metrics = outcome.step, outcome.metrics
        self.updates += 1
        self.last_update = time.time()
        now = time.monotonic()
        self._times.append(now)
        while self._times[0] < now - _MINUTE:
            self._times.popleft()
        return self._report("update", UpdateReport(live, outcome.step, status, metrics=outcome.metrics))

    def held(self, live: AdapterRef | None, refusal: Refusal, outcome: UpdateOutcome) -> UpdateReport:
        """Reports an update that the gate refused."""
        self.skips[f"held_{refusal.code}"] += 1
        if refusal.code == EVALUATION:  # what has diverged is logged by its watch
            _log.warning("an update of %s was held: %s", self._name, refusal.reason)
        return self._report("held", UpdateReport(live, self.step, "held", refusal.reason, _finite(outcome.metrics)))

    def skipped(
        self, live: AdapterRef | None, code: str, reason: str = "", metrics: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """Reports that no update was made. `code`: the reason under which it is counted. `reason`: an explanation."""
        self.skips[code] += 1
        _log.info("an update of %s was skipped: %s", self._name, reason or code)
        return self._report("skipped", UpdateReport(live, self.step, "skipped", reason or code, _finite(metrics or {})))

    def _report(self, kind: str, report: UpdateReport) -> UpdateReport:
        self._emit(
            kind,
            adapter=self._name,
            version=str(report.adapter) if report.adapter else None,
            step=report.step,
            status=report.status,
            reason=report.reason,
            metrics=dict(report.metrics),
        )
        return report


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
