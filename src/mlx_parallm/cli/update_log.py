"""A training run's updates as lines of JSON."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mlx_parallm.core import UpdateReport
from mlx_parallm.errors import ConfigError

_log = logging.getLogger(__name__)


class UpdateLog:
    """A file that lines are added to, each in one write. A context manager.

    A disk that refuses a line ends the log with a warning, not the run.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--log: {path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, step: int, report: UpdateReport, failures: Sequence[str] = ()) -> None:
        """Adds one line: what `entry` has, and the Unix time in seconds."""
        if self._file.closed:
            return
        text = json.dumps({"at": round(time.time(), 3), **entry(step, report, failures)}) + "\n"
        try:
            self._file.write(text.encode())
        except OSError as error:
            _log.warning("%s takes no more lines: %s", self.path, error.strerror)
            self._file.close()


def entry(step: int, report: UpdateReport, failures: Sequence[str] = ()) -> dict[str, object]:
    """One update as JSON has it: `step` counts the run's, `optimizer_step` all of the adapter's; metrics beside
    them by name, null where they are not finite. `failures`: of the step's tasks."""
    metrics = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
    return {
        **metrics,
        "step": step,
        "optimizer_step": report.step,
        "status": report.status,
        "reason": report.reason,
        "adapter": report.adapter.name if report.adapter else None,
        "version": report.adapter.version if report.adapter else None,
        "checkpoint": report.checkpoint,
        "failures": list(failures),
    }
