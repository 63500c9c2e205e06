"""Tracking: gives the record of every update and evaluation to trackers, which can neither stop nor delay training."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from mlx_parallm import atomic
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import MALFORMED
from mlx_parallm.rl.status import TrainingEvent, UpdateReport, UpdateStatus

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
        atomic.append_lines(self._path, (json.dumps(line, default=str) + "\n").encode(), mode=0o644)

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


# ---- what a run has made, from its metrics.jsonl -------------------------------------------------

_NO_METRICS = frozenset({"at", "step", "optimizer_step", "version"})


@dataclass(frozen=True, slots=True)
class Made:
    """A line of the file: an update, or the evaluation of the version that a run starts from.

    `step`: of the run. `at`: Unix time. `report`: it has the figures; its other fields are those of an update.
    """

    step: int
    at: float
    report: UpdateReport
    is_update: bool = True


def read_metrics(file: Path, max_bytes: int | None = None) -> list[Made]:
    """The lines of the file by their steps, an evaluation before the update of its step. Of what was made again after a
    crash, the last. No lines if there is no file, and none for what is no record, such as a line that is cut off.

    Args:
        max_bytes: read so much of the file's end; None: all of it.
    """
    found = {(made.step, made.is_update): made for made in map(_made, _lines(file, max_bytes)) if made is not None}
    return [made for _, made in sorted(found.items())]


def _lines(file: Path, max_bytes: int | None) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            if max_bytes is not None:
                lines.seek(max(0, lines.seek(0, os.SEEK_END) - max_bytes))
            yield from lines
    except OSError:
        return


def _made(line: bytes) -> Made | None:
    try:
        record = json.loads(line)
        return Made(int(record["step"]), float(record["at"]), _report(record), record["kind"] != "evaluation")
    except MALFORMED:
        return None


def _report(record: Mapping[str, Any]) -> UpdateReport:
    name, version = record.get("adapter"), record.get("version")
    metrics = {name: float(value) for name, value in record.items() if _is_metric(name, value)}
    return UpdateReport(
        AdapterRef(name, version) if isinstance(name, str) and isinstance(version, int) else None,
        int(record.get("optimizer_step", record["step"])),
        cast(UpdateStatus, record.get("status", record["kind"])),
        str(record.get("reason", "")),
        metrics,
        record.get("checkpoint"),
    )


def _is_metric(name: str, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and name not in _NO_METRICS


EVENTS_BYTES = 8 * 1024 * 1024
"""The part of the end of the file that `recorded_events` reads."""


def recorded_events(file: Path, max_bytes: int = EVENTS_BYTES) -> list[TrainingEvent]:
    """The lines of the file as the events that they record, oldest first; of a large file, those at its end. What is no
    record is left out. Reads a file, so call it in a worker thread."""
    return [event for line in _lines(file, max_bytes) if (event := _event(line)) is not None]


def _event(line: bytes) -> TrainingEvent | None:
    """The event of which `Tracking.on_event` has made a line; None if the line is no record."""
    try:
        record = json.loads(line)
        adapter, at = record["adapter"], float(record["at"])
    except MALFORMED:
        return None
    if not isinstance(adapter, str):
        return None
    version, status = record.get("version"), record.get("status")
    kind = status if status in ("held", "skipped") else "update"
    data = {
        **{name: record[name] for name in ("adapter", "status", "reason") if name in record},
        "version": None if version is None else f"{adapter}@{version}",
        "step": record.get("optimizer_step", record.get("step", 0)),
        "metrics": {name: value for name, value in record.items() if isinstance(value, float) and name != "at"},
    }
    return TrainingEvent("evaluation" if record.get("kind") == "evaluation" else kind, at, data)
