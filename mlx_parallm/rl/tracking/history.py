"""History: what has happened in the training of each adapter, from the beginning of the run, for people to look at."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.rl.status import TrainingEvent, TrainingHistory

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

MAX_FILE_BYTES = 8 * 1024 * 1024
"""The part of the end of metrics.jsonl that is read at start."""


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


def events_of(metrics_file: Path, max_bytes: int = MAX_FILE_BYTES) -> list[TrainingEvent]:
    """The updates and evaluations in metrics.jsonl, as events, oldest first; of a large file, those at its end. What is
    no record is left out. Reads a file, so call it in a worker thread."""
    try:
        with metrics_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            lines = file.read(max_bytes).splitlines()
    except OSError:
        return []  # the run has no updates yet; a file that cannot be read stops no training
    return [event for line in lines if (event := _event_of(line)) is not None]


def _event_of(line: bytes) -> TrainingEvent | None:
    """The event that a line records; None if it is no record, such as a line that is cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("adapter"), str) or "at" not in record:
        return None
    return TrainingEvent(_kind(record), float(record["at"]), _data(record))


def _kind(record: Mapping[str, Any]) -> str:
    if record.get("kind") == "evaluation":
        return "evaluation"
    status = record.get("status")
    return status if status in ("held", "skipped") else "update"


def _data(record: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the event; see `tracking.Tracking.on_event`, which made the record from it."""
    metrics = {name: value for name, value in record.items() if isinstance(value, float) and name != "at"}
    named = {name: record[name] for name in ("adapter", "status", "reason") if name in record}
    version = record.get("version")
    step = record.get("optimizer_step", record.get("step", 0))
    return {
        **named,
        "version": None if version is None else f"{record['adapter']}@{version}",
        "step": step,
        "metrics": metrics,
    }
