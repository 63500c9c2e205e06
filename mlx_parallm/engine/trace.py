"""UnitTrace: a timeline of the device thread in Chrome's trace event format.

chrome://tracing and Perfetto (https://ui.perfetto.dev) open the file. They accept an array without its closing bracket,
so the file can be opened after every unit, also while the server runs and after a crash.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from mlx_parallm.engine.units import ForwardUnit, StagingUnit, TrainingUnit, Unit
from mlx_parallm.errors import ConfigError


class UnitTrace:
    """Writes one event for each unit of device work. Device thread only.

    Args:
        path: the file, which is overwritten. None: nothing is recorded.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            try:
                self._file = path.open("w", buffering=1)  # flushed at every newline
            except OSError as error:
                raise ConfigError(f"debug.trace: {path} cannot be written: {error.strerror}") from error
            self._file.write("[")
            self._write("", name="thread_name", ph="M", args={"name": "device"})

    def unit(self, unit: Unit) -> AbstractContextManager[None]:
        """Records the time of the block that runs this unit."""
        if self._file is None:
            return nullcontext()
        match unit:
            case ForwardUnit():
                chunks = unit.chunks
                return self.span(
                    "forward", rows=unit.decodes, prompts=len(chunks), tokens=sum(chunk.tokens for chunk in chunks)
                )
            case StagingUnit():
                return self.span("stage adapters")
            case TrainingUnit():
                return self.span("train")

    @contextmanager
    def span(self, name: str, **numbers: int) -> Iterator[None]:
        """Records the time of a block under this name. `numbers` are shown with it."""
        if self._file is None:
            yield
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._write(",", name=name, ph="X", ts=started * 1e6, dur=seconds * 1e6, args=numbers)

    def close(self) -> None:
        """Closes the file. Nothing is recorded afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, separator: str, **event: object) -> None:
        """Appends one event. Times are in microseconds."""
        assert self._file is not None
        self._file.write(f"{separator}\n{json.dumps({'pid': os.getpid(), 'tid': 1, **event})}")
