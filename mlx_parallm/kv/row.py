"""KVRow: what one sequence holds in the KV pool. This module does not import MLX, so that the scheduler may use it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_parallm.kv.blocks import FREED

if TYPE_CHECKING:
    from mlx_parallm.kv.prefix import Node


@dataclass(eq=False)
class KVRow:
    """One sequence's keys and values. Tokens [0, computed) are in the pool; the blocks have room for more.

    `tables`: for each layer group, the id of each block, in order. FREED stands for a block below the group's
    sliding window. `adapter_slot`: the slot of the adapter bank that the row's tokens are computed with; 0 is the base
    model. `node`: the last block of the row that is registered in the prefix index.

    `tail`: if full blocks are quantized, the id of the row's last block in full precision. The quantized block in the
    tables then stays empty until that one is full.

    Of a model with recurrent layers, see `states`: `state` is the id of the row's state. `checkpoints`: the
    ids of states after so many blocks that no node of the prefix index has got yet. `cuts`: the token counts at
    which a chunk has to end, because a checkpoint is made there, in order. `prefix_keys`: for each of them a key, which
    is the same for rows that have the same tokens up to it. `tentative`: those of them whose checkpoints are tentative.
    `newest`: the node that got the row's last checkpoint beside those.
    """

    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    adapter_slot: int = 0
    node: Node | None = None
    tail: int = FREED
    state: int = FREED
    checkpoints: dict[int, int] = field(default_factory=dict)
    cuts: Sequence[int] = ()
    prefix_keys: Mapping[int, Hashable] = field(default_factory=dict)
    tentative: Set[int] = frozenset()
    newest: Node | None = None

    def reset(self, groups: int) -> None:
        """Makes this a row without tokens and blocks, with empty tables for so many layer groups."""
        self.tables = [[] for _ in range(groups)]
        self.computed, self.node, self.tail, self.state = 0, None, FREED, FREED
        self.checkpoints, self.cuts, self.prefix_keys, self.tentative, self.newest = {}, (), {}, frozenset(), None
