"""The layer groups of a model, whose layers have the same sliding window, and a row's blocks in each of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mlx_parallm.batch.kv.arena import Arena
from mlx_parallm.batch.kv.blocks import FREED, Places
from mlx_parallm.batch.kv.prefix import Node
from mlx_parallm.model.families import KVLayout


@dataclass(eq=False)
class KVRow:
    """One sequence's keys and values. Tokens [0, computed) are in the pool; the blocks have room for more.

    `tables`: for each layer group, the place of each block, in order. FREED stands for a block below the group's
    sliding window. `adapter_slot`: the slot of the adapter bank that the row's tokens are computed with; 0 is the base
    model. `node`: the last block of the row that is registered in the prefix index.

    `tail`: if full blocks are quantized, the place of the row's last block in full precision. The place in the tables
    then stays empty until that block is full.
    """

    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    adapter_slot: int = 0
    node: Node | None = None
    tail: int = FREED


@dataclass(eq=False, slots=True)
class LayerGroup:
    """The layers that have the same sliding window, by their indices in the model, and the memory of their blocks."""

    window: int | None
    layers: tuple[int, ...]
    arena: Arena
    places: Places[Node] = field(default_factory=Places)


def layer_groups(layout: KVLayout) -> list[LayerGroup]:
    """The groups of a model, without blocks. The one that attends to all tokens is first; then the widest window."""
    windows = {spec.window for spec in layout.layers}
    return [_layer_group(layout, window) for window in sorted(windows, key=lambda w: -math.inf if w is None else -w)]


def tail_group(layout: KVLayout) -> LayerGroup | None:
    """The memory of the last block of each row, for all layers, if full blocks are quantized; otherwise None."""
    if layout.bits is None:
        return None
    return LayerGroup(None, tuple(range(len(layout.layers))), Arena(layout.layers, layout.dtype))


def _layer_group(layout: KVLayout, window: int | None) -> LayerGroup:
    layers, stored = tuple(i for i, spec in enumerate(layout.layers) if spec.window == window), layout.stored
    return LayerGroup(window, layers, Arena([stored.layers[i] for i in layers], stored.dtype))
