"""Versions that are being read from their files, on worker threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future

from mlx_parallm.adapters.versions import Version
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import AdapterRef


class Reads:
    """Owner's thread only.

    Args:
        read: a version's weights from its files, as they were when it was added; runs on `reader`.
        wake: called on `reader`'s thread when a read has ended.
    """

    def __init__(self, read: Callable[[Version], AdapterWeights], reader: Executor, wake: Callable[[], None]) -> None:
        self._read = read
        self._reader = reader
        self._wake = wake
        self._futures: dict[AdapterRef, Future[AdapterWeights]] = {}

    def __contains__(self, version: Version) -> bool:
        return version.ref in self._futures

    def start(self, version: Version) -> None:
        future = self._reader.submit(self._read, version)
        self._futures[version.ref] = future
        future.add_done_callback(lambda _: self._wake())

    def take(self) -> list[tuple[AdapterRef, AdapterWeights | BaseException]]:
        """Those that have ended since, and what came of each."""
        ended = [(ref, future) for ref, future in self._futures.items() if future.done()]
        for ref, _ in ended:
            del self._futures[ref]
        return [(ref, future.exception() or future.result()) for ref, future in ended]
