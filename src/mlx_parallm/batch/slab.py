"""Where K and V lie: slabs of rows of one capacity class, one array pair per layer."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.model.layout import KVLayout


@dataclass(slots=True, eq=False)
class KVRow:
    """One sequence's place in the pool. Tokens [0, length) are written; the rest is garbage.

    `adapter_slot` is the row's place in the adapter bank (0 = base).
    """

    slab: Slab
    index: int
    length: int = 0
    adapter_slot: int = 0

    @property
    def capacity(self) -> int:
        return self.slab.capacity


class Slab:
    """`rows` places of `capacity` tokens: per layer, keys and values [rows, kv_heads, capacity, head_dim].

    Arrays are replaced by every write; MLX updates them in place when nobody else holds the old one.
    """

    def __init__(self, layout: KVLayout, capacity: int, rows: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.places: list[KVRow | None] = [None] * rows
        self.keys = [mx.zeros((rows, s.kv_heads, capacity, s.head_dim_k), layout.dtype) for s in layout.layers]
        self.values = [mx.zeros((rows, s.kv_heads, capacity, s.head_dim_v), layout.dtype) for s in layout.layers]

    @property
    def tokens(self) -> int:
        """Token places held, used or not."""
        return self.capacity * len(self.places)

    @property
    def used(self) -> int:
        return sum(place is not None for place in self.places)

    def free_index(self) -> int | None:
        """The lowest free place, so that live rows stay adjacent and attend in few calls."""
        return next((i for i, place in enumerate(self.places) if place is None), None)

    def occupy(self, index: int, adapter_slot: int) -> KVRow:
        assert self.places[index] is None
        row = KVRow(self, index, adapter_slot=adapter_slot)
        self.places[index] = row
        return row

    def write(self, layer: int, rows: mx.array, positions: mx.array, keys: mx.array, values: mx.array) -> None:
        """One token per row: keys/values [n, kv_heads, head_dim] at `rows` [n], `positions` [n]."""
        self.keys[layer][rows, :, positions] = keys
        self.values[layer][rows, :, positions] = values

    def write_span(self, layer: int, index: int, start: int, keys: mx.array, values: mx.array) -> None:
        """Tokens start… of one row: keys/values [1, kv_heads, tokens, head_dim]."""
        stop = start + keys.shape[2]
        self.keys[layer][index : index + 1, :, start:stop] = keys
        self.values[layer][index : index + 1, :, start:stop] = values

    def span(self, layer: int, rows: slice, tokens: slice) -> tuple[mx.array, mx.array]:
        """Views of keys and values, [rows, kv_heads, tokens, head_dim]."""
        return self.keys[layer][rows, :, tokens], self.values[layer][rows, :, tokens]

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]
