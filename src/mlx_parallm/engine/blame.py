"""What the calls into MLX that are under way are made for: a fault costs that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mlx_parallm.core import DeviceWork
from mlx_parallm.engine.live import LiveRequest

Blamed = tuple[tuple[LiveRequest, ...], DeviceWork | None]
"""Requests, or work beside them: adapters or training."""

_NOBODY: Blamed = ((), None)


class Blame:
    """Device thread only."""

    def __init__(self) -> None:
        self._blamed = _NOBODY

    @contextmanager
    def on(self, requests: Iterable[LiveRequest] = (), work: DeviceWork | None = None) -> Iterator[None]:
        """While the block runs, a fault costs these. They stay blamed when the block raises, until `take`."""
        before, self._blamed = self._blamed, (tuple(requests), work)
        yield
        self._blamed = before

    def take(self) -> Blamed:
        """Who is blamed for a fault, once."""
        blamed, self._blamed = self._blamed, _NOBODY
        return blamed
