"""The arrays of recurrent states: each place holds one state, which is some arrays of every recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.batch.kv.arena import PlaceArrays
from mlx_parallm.model.layer_state import RecurrentSpec


class StateArena(PlaceArrays):
    """The states of the recurrent layers of a model.

    `layers`: for each recurrent layer its arrays, each [places, ...].
    """

    def __init__(self, specs: Sequence[RecurrentSpec]) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.layers = [
            [mx.zeros((0, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            for spec in specs
        ]

    @property
    def block_bytes(self) -> int:
        """Bytes of one state."""
        return sum(spec.nbytes for spec in self.specs)

    def arrays(self) -> list[mx.array]:
        return [array for arrays in self.layers for array in arrays]

    def places(self, layer: int) -> int:
        return int(self.layers[layer][0].shape[0])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `PlaceArrays.copy`."""
        if not sources:
            return
        read = mx.array(list(sources))
        copies = [self.read(layer, read) for layer in range(self._layers)]
        mx.eval(copies)
        for layer, arrays in enumerate(copies):
            self.write(layer, mx.array(list(targets)), arrays)
        mx.eval(self.layers)

    def read(self, layer: int, places: mx.array) -> list[mx.array]:
        """Copies of a layer's arrays at `places` int [n], each [n, ...]."""
        return [array[places] for array in self.layers[layer]]

    def write(self, layer: int, places: mx.array, arrays: Sequence[mx.array]) -> None:
        """Writes a layer's arrays, each [n, ...], at `places` int [n]."""
        for index, (array, new) in enumerate(zip(self.layers[layer], arrays, strict=True)):
            array[places] = new.astype(array.dtype)
            self.layers[layer][index] = array

    @property
    def _layers(self) -> int:
        return len(self.layers)

    def _resize_layer(self, layer: int, blocks: int) -> int:
        resized = [_resized(array, blocks) for array in self.layers[layer]]
        mx.eval(resized)
        self.layers[layer] = resized
        return sum(int(array.nbytes) for array in resized)


def _resized(array: mx.array, places: int) -> mx.array:
    held, *shape = array.shape
    if places <= held:
        return mx.contiguous(array[:places])
    return mx.concatenate([array, mx.zeros((places - held, *shape), array.dtype)])
