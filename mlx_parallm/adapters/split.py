"""The part of the adapter bank that one rank holds, if the model is split over several machines.

    linear split by output   a is whole, b has this rank's columns   the outputs of all ranks together are the whole
    linear split by input    a has this rank's rows, b is whole      the sum over the ranks is the whole

Files, checkpoints and everything outside this module know whole factors only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import mlx.core as mx

from mlx_parallm.adapters.linear_group import LinearGroup
from mlx_parallm.adapters.weights import LinearSpec, LoRAPair


class SplitBy(StrEnum):
    """Which features of a linear are divided among the ranks."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class LinearSplit:
    """How a linear is divided. `padded`: its number of inputs or outputs, with those that were added as zeros so that
    it can be divided."""

    by: SplitBy
    padded: int


@dataclass(frozen=True)
class ModelSplit:
    """How the linears of a model are divided among ranks. Linears that are not in `linears` are whole on every rank."""

    group: mx.distributed.Group
    linears: Mapping[str, LinearSplit]

    def spec(self, spec: LinearSpec) -> LinearSpec:
        """The shape of this rank's part of a linear."""
        split = self.linears.get(spec.path)
        if split is None:
            return spec
        part = split.padded // self.group.size()
        if split.by is SplitBy.OUTPUT:
            return replace(spec, out_features=part)
        return replace(spec, in_features=part)

    def part(self, path: str, pair: LoRAPair) -> LoRAPair:
        """This rank's part of a whole pair."""
        split = self.linears.get(path)
        if split is None:
            return pair
        size = split.padded // self.group.size()
        mine = slice(self.group.rank() * size, (self.group.rank() + 1) * size)
        if split.by is SplitBy.OUTPUT:
            return replace(pair, b=_padded(mx.array(pair.b), 1, split.padded)[:, mine])
        return replace(pair, a=_padded(mx.array(pair.a), 0, split.padded)[mine])

    def whole(self, spec: LinearSpec, pair: LoRAPair) -> LoRAPair:
        """The whole pair of which every rank has a part. All ranks call it at once. `spec`: of the whole linear."""
        split = self.linears.get(spec.path)
        if split is None:
            return pair
        if split.by is SplitBy.OUTPUT:
            return replace(pair, b=self._gather(pair.b.T)[: spec.out_features].T)
        return replace(pair, a=self._gather(pair.a)[: spec.in_features])

    def _gather(self, part: mx.array) -> mx.array:
        return mx.distributed.all_gather(mx.contiguous(part), group=self.group)


class SplitGroup(LinearGroup):
    """The factors of one rank. It takes and returns whole pairs."""

    def __init__(self, specs: Sequence[LinearSpec], rank: int, dtype: mx.Dtype, split: ModelSplit) -> None:
        super().__init__([split.spec(spec) for spec in specs], rank, dtype)
        self._whole_specs = {spec.path: spec for spec in specs}
        self._split = split

    def write(self, slot: int, pairs: dict[str, LoRAPair]) -> None:
        """See `LinearGroup.write`."""
        super().write(slot, {path: self._split.part(path, pair) for path, pair in pairs.items()})

    def read(self, slot: int, ranks: dict[str, int]) -> dict[str, LoRAPair]:
        """See `LinearGroup.read`. All ranks call it at once."""
        parts = super().read(slot, ranks)
        pairs = {path: self._split.whole(self._whole_specs[path], part) for path, part in parts.items()}
        mx.eval([(pair.a, pair.b) for pair in pairs.values()])
        return pairs


def _padded(array: mx.array, axis: int, size: int) -> mx.array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return mx.pad(array, widths)
