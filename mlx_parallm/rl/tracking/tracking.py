"""Tracking: gives the record of every update and evaluation to trackers, which can neither stop nor delay training."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.rl.status import TrainingEvent

_MAX_QUEUED = 1000
"""Records that may wait for one tracker. Further ones are lost, and counted."""

_CLOSE_S = 10.0
"""Time that each tracker gets at the end to write what waits."""

_EVENTS = frozenset(("update", "held", "skipped", "evaluation"))

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """One update, or one evaluation.

    Attributes:
        kind: update or evaluation.
        step: of the run in mlx_parallm_train, else of the adapter's optimizer.
        metrics: figures by name, which need not be finite.
        fields: everything else that is known, as JSON values: status, adapter, version, checkpoint and so on.
        at: Unix time in seconds.
    """

    kind: str
    step: int
    metrics: Mapping[str, float]
    fields: Mapping[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.time)


class Tracker(Protocol):
    """Writes the records of one run. All methods are called on a thread of its own, and may raise."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """Appends a line for each record, in one write: the metrics by name (null if not finite), and the other fields."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record) -> None:
        line = {
            "at": round(record.at, 3),
            "kind": record.kind,
            **{name: value if math.isfinite(value) else None for name, value in record.metrics.items()},
            **record.fields,
            "step": record.step,
        }
        data = (json.dumps(line, default=str) + "\n").encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Nothing is open between two records."""


class Tracking:
    """Gives records to trackers. Each has its own thread and queue; `write` never waits and never raises.

    Args:
        trackers: functions that open a tracker, by its name. They are called on its thread, at the first record.
    """

    def __init__(self, trackers: Mapping[str, Callable[[], Tracker]], max_queued: int = _MAX_QUEUED) -> None:
        self._workers = [_Worker(name, open_tracker, max_queued) for name, open_tracker in trackers.items()]

    @property
    def failures(self) -> Mapping[str, int]:
        """Records that a tracker has not written, by tracker. Those without a failure are left out."""
        return {worker.name: worker.failures for worker in self._workers if worker.failures}

    def write(self, record: Record) -> None:
        for worker in self._workers:
            worker.put(record)

    def on_event(self, event: TrainingEvent) -> None:
        """Writes a training event, if it is an update or an evaluation."""
        if event.kind in _EVENTS:
            data = dict(event.data)
            if version := data.get("version"):
                data["version"] = int(str(version).rpartition("@")[2])
            kind = "evaluation" if event.kind == "evaluation" else "update"
            self.write(Record(kind, data.pop("step", 0), data.pop("metrics", {}), data, event.at))

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Blocks until the trackers have written everything, or for `timeout_s` for each that does not end."""
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.join(timeout_s)


class _Worker:
    """One tracker with its thread and its queue. None in the queue ends the thread."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], max_queued: int) -> None:
        self.name = name
        self.failures = 0
        self._open = open_tracker
        self._queue: queue.Queue[Record | None] = queue.Queue(max_queued)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._failed(f"it is too slow: {self._queue.maxsize} records wait")

    def end(self) -> None:
        self._ending.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return  # the thread looks at `_ending` when it has emptied the queue

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("tracker %s has not ended after %g s; what it had not written is lost", self.name, timeout_s)

    def _run(self) -> None:
        tracker, opened = None, False
        while (record := self._next()) is not None:
            if not opened:
                tracker, opened = self._attempt(self._open), True
            if tracker is None:
                self.failures += 1
            else:
                self._attempt(partial(tracker.write, record))
        if tracker is not None:
            self._attempt(tracker.close)

    def _next(self) -> Record | None:
        if self._ending.is_set() and self._queue.empty():
            return None
        return self._queue.get()

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; None if it raises."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a package of others may raise anything; training goes on
            self._failed(f"{type(error).__name__}: {error}")
            return None

    def _failed(self, why: str) -> None:
        """Counts a failure. Only the first one is logged."""
        self.failures += 1
        if self.failures == 1:
            _log.warning("tracker %s fails, and training goes on: %s", self.name, why)
