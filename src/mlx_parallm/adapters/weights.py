"""The weights of one adapter: a pair of low-rank factors for each linear that it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Array = Any
"""numpy or MLX, float. Files and threads other than the device's have numpy's only."""


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """y = x W + scale · (x a) b with a [in, rank], b [rank, out], scale = alpha / rank (LoRA, arXiv 2106.09685)."""

    a: Array
    b: Array
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes + self.b.nbytes)


@dataclass(frozen=True)
class AdapterWeights:
    """Pairs by the path of their linear; a linear that is not there is not changed. Ranks and scales may differ."""

    pairs: Mapping[str, LoRAPair]

    @cached_property
    def rank(self) -> int:
        """The largest."""
        return max(pair.rank for pair in self.pairs.values())

    @cached_property
    def alpha(self) -> float:
        """Scale times rank, the largest."""
        return max(pair.scale * pair.rank for pair in self.pairs.values())

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The last parts of the paths, sorted."""
        return tuple(sorted({path.rpartition(".")[2] for path in self.pairs}))

    @property
    def nbytes(self) -> int:
        return sum(pair.nbytes for pair in self.pairs.values())
