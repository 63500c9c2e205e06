"""KVRow: what one sequence holds in the KV pool. This module does not import MLX, so that the scheduler may use it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.kv.prefix import PrefixNode

BEFORE_DRAFT = 0
"""Takes the place of a number of blocks in `KVRow.checkpoints`."""


@dataclass(eq=False)
class KVRow:
    """One sequence's keys and values. Tokens [0, computed) are in the pool; the blocks have room for more.

    `tables`: for each store of the pool, the ids of the row's blocks, in order. Of a layer group, FREED stands for a
    block below its sliding window. After them come the row's state, if there are recurrent layers, and its last block
    in full precision, if full blocks are quantized: one block each. The quantized one then stays empty until that is
    full. `adapter_slot`: the slot of the adapter bank that the row's tokens are computed with; 0 is the base
    model. `node`: the last block of the row that is registered in the prefix index.

    Of a model with recurrent layers, see `states`. `checkpoints`: the
    ids of states after so many blocks that no node of the prefix index has got yet; under `BEFORE_DRAFT`, that of the
    state before a draft. `to_redo`: how many of the computed tokens the next pass computes again, because the state
    went back to that one. `cuts`: the token counts at
    which a chunk has to end, because a checkpoint is made there, in order. `prefix_keys`: for each of them a key, which
    is the same for rows that have the same tokens up to it. `tentative`: those of them whose checkpoints are tentative.
    `newest`: the node that got the row's last checkpoint beside those.
    """

    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    adapter_slot: int = 0
    node: PrefixNode | None = None
    checkpoints: dict[int, int] = field(default_factory=dict)
    cuts: Sequence[int] = ()
    prefix_keys: Mapping[int, Hashable] = field(default_factory=dict)
    tentative: Set[int] = frozenset()
    newest: PrefixNode | None = None
    to_redo: int = 0

    def reset(self, stores: int) -> None:
        """Makes this a row without tokens and blocks, with so many empty tables."""
        self.tables = [[] for _ in range(stores)]
        self.computed, self.to_redo, self.node = 0, 0, None
        self.checkpoints, self.cuts, self.prefix_keys, self.tentative, self.newest = {}, (), {}, frozenset(), None
