"""Weights of versions that are in no slot, unpadded, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from mlx_parallm.adapters.versions import Version
from mlx_parallm.adapters.weights import AdapterWeights


class Copies:
    """At most `most` copies; more only where dropping one would lose weights that somebody needs.

    Args:
        may_drop: whether a version's copy can go.
    """

    def __init__(self, most: int, may_drop: Callable[[Version], bool]) -> None:
        self.most = most
        self._may_drop = may_drop
        self._weights: OrderedDict[Version, AdapterWeights] = OrderedDict()

    def __contains__(self, version: Version) -> bool:
        return version in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def nbytes(self) -> int:
        return sum(weights.nbytes for weights in self._weights.values())

    def put(self, version: Version, weights: AdapterWeights) -> None:
        """Keeps a copy; the least recently kept others make way."""
        self._weights[version] = weights
        self._weights.move_to_end(version)
        for old in list(self._weights)[:-1]:
            if len(self._weights) <= self.most:
                return
            if self._may_drop(old):
                del self._weights[old]

    def purge(self, gone: Callable[[Version], bool]) -> None:
        """Drops the copies of versions that nobody can ask for any more."""
        for version in [version for version in self._weights if gone(version)]:
            del self._weights[version]

    def get(self, version: Version) -> AdapterWeights | None:
        return self._weights.get(version)

    def take(self, version: Version) -> AdapterWeights:
        return self._weights.pop(version)
