"""Brings lazy weights into memory, tensor by tensor, and says on stderr how far it is."""

from __future__ import annotations

import sys
import time

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

_PLAIN_INTERVAL_S = 5.0


def materialize(model: nn.Module, name: str, show: bool) -> None:
    """Evaluates every weight on this thread; one at a time, so that what each was made from is freed at once.

    `show`: a bar on a terminal, else a plain line now and then. Nothing goes to stdout.
    """
    tensors = [array for _, array in tree_flatten(model.parameters())]
    report: _Bar | _Lines | _Silence
    if not show:
        report = _Silence()
    elif sys.stderr.isatty():
        report = _Bar(name, sum(array.nbytes for array in tensors))
    else:
        report = _Lines(name, len(tensors), sum(array.nbytes for array in tensors))
    for array in tensors:
        mx.eval(array)
        report.advance(array.nbytes)
    report.close()


class _Silence:
    def advance(self, size: int) -> None: ...

    def close(self) -> None: ...


class _Bar:
    def __init__(self, name: str, total_bytes: int) -> None:
        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._progress.start()
        self._task = self._progress.add_task(name, total=total_bytes)

    def advance(self, size: int) -> None:
        self._progress.advance(self._task, size)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, name: str, tensors: int, total_bytes: int) -> None:
        self._name, self._tensors, self._total = name, tensors, total_bytes
        self._done = self._bytes = 0
        self._started = self._spoke = time.monotonic()

    def advance(self, size: int) -> None:
        self._done += 1
        self._bytes += size
        if time.monotonic() - self._spoke > _PLAIN_INTERVAL_S:
            self._spoke = time.monotonic()
            self._say("loading")

    def close(self) -> None:
        self._say("loaded")

    def _say(self, verb: str) -> None:
        print(
            f"{verb} {self._name}: {self._done}/{self._tensors} tensors, "
            f"{self._bytes / 1e6:.0f}/{self._total / 1e6:.0f} MB, {time.monotonic() - self._started:.1f} s",
            file=sys.stderr,
            flush=True,
        )
