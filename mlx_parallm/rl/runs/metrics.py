"""What a run has made, from its metrics.jsonl, which `tracking.trackers` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.status import UpdateReport, UpdateStatus

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
    except (ValueError, TypeError, LookupError):
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
