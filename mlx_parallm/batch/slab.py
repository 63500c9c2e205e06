"""Storage of keys and values: slabs of rows of one capacity, with one pair of arrays per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.model.families import KVLayout, LayerSpec


@dataclass(slots=True, eq=False)
class KVRow:
    """One sequence's place in the pool. Tokens [0, length) are written; the rest is undefined.

    `adapter_slot`: the slot of the adapter bank that the row's tokens are computed with; 0 is the base model.
    """

    slab: Slab
    index: int
    length: int = 0
    adapter_slot: int = 0

    @property
    def capacity(self) -> int:
        return self.slab.capacity


class Slab:
    """`rows` places of `capacity` tokens. Per layer, keys and values [rows, kv_heads, capacity, head_dim].

    They are stored flat, [rows * kv_heads * capacity, head_dim], so that a decode step writes with one scatter and one
    index array. Every write replaces the arrays; MLX updates them in place if nothing else refers to the old ones.
    """

    def __init__(self, layout: KVLayout, capacity: int, rows: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.places: list[KVRow | None] = [None] * rows
        self.keys = [self._zeros(spec, spec.head_dim_k) for spec in layout.layers]
        self.values = [self._zeros(spec, spec.head_dim_v) for spec in layout.layers]

    @property
    def tokens(self) -> int:
        """Token places in the slab, used or not."""
        return self.capacity * len(self.places)

    @property
    def used(self) -> int:
        return sum(place is not None for place in self.places)

    def free_index(self) -> int | None:
        """The lowest free place, so that live rows stay adjacent and need few attention calls. None if all are used."""
        return next((i for i, place in enumerate(self.places) if place is None), None)

    def occupy(self, index: int) -> KVRow:
        assert self.places[index] is None
        row = KVRow(self, index)
        self.places[index] = row
        return row

    def lines(self, rows: Sequence[KVRow], kv_heads: int) -> mx.array:
        """Flat indices [n * kv_heads] of the next token of each row, in a layer with `kv_heads` heads."""
        return mx.array(
            [(row.index * kv_heads + head) * self.capacity + row.length for row in rows for head in range(kv_heads)]
        )

    def write(self, layer: int, lines: mx.array, keys: mx.array, values: mx.array) -> None:
        """Writes one token per row: keys and values [n, kv_heads, 1, head_dim] at `lines` [n * kv_heads]."""
        self.keys[layer][lines] = keys.reshape(-1, keys.shape[-1])
        self.values[layer][lines] = values.reshape(-1, values.shape[-1])

    def write_span(self, layer: int, index: int, start: int, keys: mx.array, values: mx.array) -> None:
        """Writes tokens of one row from `start` on: keys and values [1, kv_heads, tokens, head_dim]."""
        self.keys[layer] = self._spanned(self.keys[layer], layer, index, start, keys)
        self.values[layer] = self._spanned(self.values[layer], layer, index, start, values)

    def span(self, layer: int, rows: slice, tokens: slice) -> tuple[mx.array, mx.array]:
        """Views of the keys and values, [rows, kv_heads, tokens, head_dim]."""
        keys, values = self._shaped(self.keys[layer], layer), self._shaped(self.values[layer], layer)
        return keys[rows, :, tokens], values[rows, :, tokens]

    def _zeros(self, spec: LayerSpec, head_dim: int) -> mx.array:
        return mx.zeros((len(self.places) * spec.kv_heads * self.capacity, head_dim), self.layout.dtype)

    def _shaped(self, array: mx.array, layer: int) -> mx.array:
        return array.reshape(len(self.places), self.layout.layers[layer].kv_heads, self.capacity, -1)

    def _spanned(self, array: mx.array, layer: int, index: int, start: int, update: mx.array) -> mx.array:
        shaped = self._shaped(array, layer)
        shaped[index : index + 1, :, start : start + update.shape[2]] = update
        return shaped.reshape(array.shape)

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]
