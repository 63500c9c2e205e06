"""The layer groups of a model, whose layers have the same sliding window, and the memory of each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from mlx_parallm.batch.kv.arena import Arena
from mlx_parallm.batch.kv.blocks import Places
from mlx_parallm.batch.kv.prefix import Node
from mlx_parallm.batch.kv.state_arena import StateArena
from mlx_parallm.model.layer_state import KVLayout


class PlaceArrays(Protocol):
    """Arrays with places, which grow and shrink; see `Arena` and `StateArena`."""

    blocks: int
    goal: int

    @property
    def block_bytes(self) -> int: ...

    @property
    def array_bytes(self) -> int: ...

    def resize(self, blocks: int, most_bytes: float = math.inf) -> bool: ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def arrays(self) -> list[mx.array]: ...


@dataclass(eq=False, slots=True)
class Store:
    """Arrays of one kind with the same places, and which of the places are used."""

    arena: PlaceArrays
    places: Places[Node] = field(default_factory=Places)


@dataclass(eq=False, slots=True, kw_only=True)
class LayerGroup(Store):
    """The layers that have the same sliding window, by their indices in the model, and the memory of their blocks."""

    arena: Arena
    window: int | None
    layers: tuple[int, ...]


@dataclass(eq=False, slots=True, kw_only=True)
class StateGroup(Store):
    """The recurrent layers or opaque caches, by their indices in the model, and the memory of their states."""

    arena: StateArena
    layers: tuple[int, ...]


def layer_groups(layout: KVLayout) -> list[LayerGroup]:
    """The groups of a model, without blocks. The one that attends to all tokens is first; then the widest window. A
    model without attention has one group without layers."""
    windows = {spec.window for spec in layout.attention.values()} or {None}
    return [_layer_group(layout, window) for window in sorted(windows, key=lambda w: -math.inf if w is None else -w)]


def tail_group(layout: KVLayout) -> LayerGroup | None:
    """The memory of the last block of each row, for all layers, if full blocks are quantized; otherwise None."""
    if layout.bits is None:
        return None
    layers = layout.attention
    return LayerGroup(arena=Arena(list(layers.values()), layout.dtype), window=None, layers=tuple(layers))


def state_group(layout: KVLayout) -> StateGroup | None:
    """The memory of states; None if no layer has any."""
    layers = layout.states
    return StateGroup(arena=StateArena(list(layers.values())), layers=tuple(layers)) if layers else None


def _layer_group(layout: KVLayout, window: int | None) -> LayerGroup:
    layers, stored = tuple(i for i, spec in layout.attention.items() if spec.window == window), layout.stored
    arena = Arena([stored.attention[i] for i in layers], stored.dtype, 0 if layers else layout.bytes_per_token)
    return LayerGroup(arena=arena, window=window, layers=layers)
