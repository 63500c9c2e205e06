"""Recurrent states, and the checkpoints from which other rows can go on.

A state is arrays of every recurrent layer, which are never written again, or else a copy of each opaque cache, which no
pass uses again. So a block here is a reference to a state, and to copy a state copies no array. The states after a
forward pass over several rows are one batch. If the next pass has the same rows, it takes the batch as it is; otherwise
the batch is cut up.

    block ids   0    1    2    3         pass over rows 0, 1, 2: one batch, [3, ...] for each array
    hold        └────┴────┘    │
                batch          └ batch of one row, such as a checkpoint

    state of a row     after its last token; each forward pass replaces it
    checkpoint         after the last token of a block; a node of the prefix index has it, and new rows begin with it

A state cannot be brought back to fewer tokens. So before a pass with a draft the row keeps its state, and goes back to
it if the draft was wrong; the next pass computes the tokens again that were right. And a cached prefix is of use only
up to a block with a checkpoint.
Checkpoints are made by the forward pass that ends with the block. A state is large, so few blocks have one:

    the last full block of a prompt                    for the same prompt, and for the next turn of a conversation
    the last block that a new prompt shares with       for all that begin alike: the second of them makes it, and the
    others                                             third one finds all that they share
    the last block that a row has filled               for the row itself after a preemption, and for what follows it
    tentative: the last one of a prompt's first        for the second prompt that begins alike: it finds a system
    message, and those after 2, 4, ... times and       prompt, and at least half of whatever it shares, from 256
    1/2, 1/4, ... of as many blocks                    tokens on

Most tentative ones are never used. They have a small share of the memory to themselves, where the oldest makes room for
the next; one with which a row begins counts as any other from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_parallm.kv.arena import Bytes
from mlx_parallm.kv.blocks import BLOCK_TOKENS, FREED
from mlx_parallm.kv.prefix import PrefixNode
from mlx_parallm.kv.row import BEFORE_DRAFT, KVRow
from mlx_parallm.model.layer_state import OpaqueSpec, RecurrentSpec

if TYPE_CHECKING:
    from mlx_parallm.kv.memory import KVMemory, StateGroup

_FIRST_TENTATIVE = 4
"""Blocks up to the first tentative checkpoint, unless the first message ends before that."""

_TENTATIVE_SHARE = 1 / 8
"""The share of the pool's memory that tentative checkpoints may take."""


@dataclass(eq=False, slots=True)
class StateBatch:
    """The states of some rows. `layers`: for each recurrent layer its arrays, each [rows, ...]; for each opaque cache,
    that of the one row."""

    rows: int
    layers: list[list[Any]]

    def row(self, index: int) -> StateBatch:
        """The state of one row alone, which does not keep the others in memory once it is evaluated."""
        if self.rows == 1:
            return self
        return StateBatch(1, [[mx.contiguous(a[index : index + 1]) for a in arrays] for arrays in self.layers])


@dataclass(frozen=True, slots=True)
class _Held:
    """The state at `index` of a batch."""

    batch: StateBatch
    index: int


class StateArena:
    """The states of a model's recurrent layers or opaque caches, one in each block.

    Attributes:
        blocks, goal: how many there are.
    """

    def __init__(self, specs: Sequence[RecurrentSpec | OpaqueSpec]) -> None:
        self.specs = tuple(specs)
        self.blocks = self.goal = 0
        self._held: list[_Held | None] = []
        self._new: list[mx.array] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one state. Those by which opaque caches grow count as blocks of the row."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def array_bytes(self) -> int:
        """Bytes of all blocks. A free one may hold a state until the next pass, or until it is taken away."""
        return self.blocks * self.block_bytes

    def resize(self, blocks: int, most_bytes: float = math.inf) -> bool:
        """Adds empty blocks at the end, or removes blocks from the end. Returns True: it is done at once."""
        del self._held[blocks:]
        self._held += [None] * (blocks - len(self._held))
        self.blocks = self.goal = blocks
        return True

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the states at `sources` to `targets`. No block may be in both."""
        for source, target in zip(sources, targets, strict=True):
            self._held[target] = self._held[source]

    def to_host(self, block_id: int) -> list[Bytes]:
        """Copies a state to host memory: the bytes of each array of each layer."""
        held = self._held[block_id]
        assert held is not None, block_id
        arrays = [mx.flatten(array).view(mx.uint8) for layer in _sliced(held) for array in layer]
        mx.eval(arrays)
        return [np.asarray(array).copy() for array in arrays]

    def from_host(self, block_id: int, arrays: Sequence[Bytes]) -> None:
        """Lets a block hold a state, of arrays as `to_host` returns them."""
        given = iter(arrays)
        specs = (spec for spec in self.specs if isinstance(spec, RecurrentSpec))
        kinds = (zip(spec.shapes, spec.dtypes, strict=True) for spec in specs)
        layers = [[mx.array(next(given)).view(dtype).reshape(1, *shape) for shape, dtype in kind] for kind in kinds]
        mx.eval(layers)
        self.write([block_id], StateBatch(1, layers))

    def arrays(self) -> list[mx.array]:
        """The arrays that the last pass has made."""
        return self._new

    # -- one forward pass ------------------------------------------------------------------------

    def begin_pass(self, is_free: Callable[[int], bool]) -> None:
        """Call it before the states of a pass are read. Blocks that are free let go of what they hold."""
        self._new = []
        self._held = [None if is_free(block_id) else held for block_id, held in enumerate(self._held)]

    def read(self, block_ids: Sequence[int | None]) -> StateBatch | None:
        """The states in these blocks, zeros for None. None if there are only zeros."""
        held = [None if block_id is None else self._held[block_id] for block_id in block_ids]
        if not any(held):
            return None
        if (first := held[0]) is not None and held == [_Held(first.batch, i) for i in range(first.batch.rows)]:
            return first.batch
        rows = [_sliced(each) if each is not None else self._zeros() for each in held]
        return StateBatch(len(rows), [_joined(arrays) for arrays in zip(*rows, strict=True)])

    def write(self, block_ids: Sequence[int], batch: StateBatch) -> None:
        """Lets these blocks hold the rows of a batch, in order. Its layers may be added later."""
        for index, block_id in enumerate(block_ids):
            self._held[block_id] = _Held(batch, index)

    def add(self, arrays: Sequence[mx.array]) -> None:
        """Counts arrays among those that the pass has made."""
        self._new += arrays

    def batches(self, block_ids: Iterable[int | None]) -> list[StateBatch]:
        """The batches of several rows that these blocks hold a row of."""
        held = (self._held[block_id] for block_id in block_ids if block_id is not None)
        return list(dict.fromkeys(each.batch for each in held if each is not None and each.batch.rows > 1))

    def cut_up(self, batch: StateBatch) -> None:
        """Lets each block that holds a row of this batch hold that row alone, so that the batch can leave memory."""
        for block_id, held in enumerate(self._held):
            if held is not None and held.batch is batch:
                self._held[block_id] = _Held(self._alone(held), 0)

    def _alone(self, held: _Held) -> StateBatch:
        alone = held.batch.row(held.index)
        self._new += [array for arrays in alone.layers for array in arrays]
        return alone

    def _zeros(self) -> list[list[mx.array]]:
        return [
            [mx.zeros((1, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            for spec in self.specs
            if isinstance(spec, RecurrentSpec)
        ]


def _sliced(held: _Held) -> list[list[mx.array]]:
    return [[array[held.index : held.index + 1] for array in arrays] for arrays in held.batch.layers]


def _joined(rows: Sequence[list[mx.array]]) -> list[mx.array]:
    """The arrays of one layer for all rows, of those of each row."""
    return [mx.concatenate(list(arrays)) for arrays in zip(*rows, strict=True)]


class StateCheckpoints:
    """Makes checkpoints of the states of rows, and gives them to nodes of the prefix index and to new rows.

    Attributes:
        tentative: the nodes with a tentative checkpoint, the oldest first. Some may have lost it.

    Args:
        memory: what `states` and the prefix index belong to.
        control_ids: tokens that can end a message of a chat.
    """

    def __init__(self, memory: KVMemory, states: StateGroup, control_ids: Collection[int]) -> None:
        self.tentative: dict[PrefixNode, None] = {}
        self._memory, self._states, self._control_ids = memory, states, control_ids

    # -- rows ------------------------------------------------------------------------------------

    def plan(self, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
        """Sets the token counts at which the chunks of a new row have to end, because it leaves a checkpoint there.

        The checkpoint with which the row begins is kept until `begin`.
        """
        last = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        shared = len(self._memory.index.chain(root, ids)) * BLOCK_TOKENS
        row.tentative = {cut for cut in self._likely_shared(ids) if shared < cut < last}
        row.cuts = tuple(sorted(cut for cut in {shared, last, *row.tentative} if cut > row.computed))
        row.prefix_keys = {cut: (root, cut, hash(tuple(ids[:cut]))) for cut in row.cuts}
        if row.node is not None:
            block_id = self.at(row.node)
            self._states.allocator.acquire(block_id)
            self.tentative.pop(row.node, None)
            row.checkpoints[row.node.depth] = block_id

    def _likely_shared(self, ids: Sequence[int]) -> set[int]:
        """The token counts of a prompt's tentative checkpoints. Some may be beyond its end.

        A message ends before a control token. Those in the first block begin the first message.
        """
        rest = islice(enumerate(ids), BLOCK_TOKENS, None)
        first = next((at for at, id in rest if id in self._control_ids), 0) // BLOCK_TOKENS or _FIRST_TENTATIVE
        longer = {first << times for times in range(len(ids).bit_length())}
        shorter = {first >> times for times in range(first.bit_length())}
        return {blocks * BLOCK_TOKENS for blocks in longer | shorter if blocks >= min(first, _FIRST_TENTATIVE)}

    def begin(self, row: KVRow) -> bool:
        """Makes the checkpoint that a new row keeps, if it does, its own state. Returns False if the device is out of
        memory."""
        copied = all(self.copy(block_id, row) for block_id in row.checkpoints.values())
        for block_id in row.checkpoints.values():
            self._states.allocator.release(block_id)
        row.checkpoints.clear()
        return copied

    def copy(self, block_id: int, row: KVRow) -> bool:
        """Copies a state to that of a row. Returns False if the device is out of memory."""
        return self._memory.copy(self._states, [block_id], [self._states.block_of(row)])

    def reserve(self, row: KVRow, tokens: int) -> None:
        """Takes a block for the row's state after `tokens` tokens, if these are whole blocks and there is memory. The
        pass that ends there puts the state into it."""
        depth, rest = divmod(tokens, BLOCK_TOKENS)
        if rest or depth in row.checkpoints or (tokens in row.tentative and not self._most_tentative()):
            return
        if self._memory.make_room({self._states: 1}):
            (row.checkpoints[depth],) = self._states.allocator.allocate(1)

    def keep_before_draft(self, row: KVRow) -> bool:
        """Keeps the row's state, because the next pass has a draft. Returns False if there is no memory for it."""
        if BEFORE_DRAFT not in row.checkpoints:
            if not self._memory.make_room({self._states: 1}):
                return False
            (row.checkpoints[BEFORE_DRAFT],) = self._states.allocator.allocate(1)
        self._states.arena.copy([self._states.block_of(row)], [row.checkpoints[BEFORE_DRAFT]])
        return True

    def settle_draft(self, row: KVRow, start: int, right: bool) -> None:
        """Ends what `keep_before_draft` began. If not all of the draft was `right`, the row goes back to the state that
        it had before the pass, after `start` tokens."""
        kept = row.checkpoints.pop(BEFORE_DRAFT)
        if not right:
            self._states.arena.copy([kept], [self._states.block_of(row)])
            row.to_redo = row.computed - start
        self._states.allocator.release(kept)

    # -- nodes -----------------------------------------------------------------------------------

    def at(self, node: PrefixNode) -> int:
        """The block of the state at the end of a node, or FREED."""
        return node.block_ids[self._states.number]

    def register(self, row: KVRow, node: PrefixNode) -> None:
        """Gives a node the checkpoint that the row has made at its end, if it has made one.

        A row keeps the checkpoints that were planned, and of the others the last one.
        """
        if (block_id := row.checkpoints.pop(node.depth, None)) is None:
            return
        if self.at(node) == FREED:
            self._memory.index.cache(node, self._states.number, block_id)
            self.tentative.pop(node, None)
            if node.depth * BLOCK_TOKENS in row.tentative:
                self._add_tentative(node)
            elif node.depth * BLOCK_TOKENS not in row.cuts:
                if row.newest is not None:
                    self._memory.index.drop_block(row.newest, self._states.number)
                row.newest = node
        self._states.allocator.release(block_id)

    def _add_tentative(self, node: PrefixNode) -> None:
        self.tentative[node] = None
        while len(self.tentative) > self._most_tentative():
            oldest = next(iter(self.tentative))
            del self.tentative[oldest]
            self._memory.index.drop_block(oldest, self._states.number)

    def _most_tentative(self) -> int:
        """How many tentative checkpoints there may be."""
        limit = self._memory.device.pool_limit(alone=False)
        return int(_TENTATIVE_SHARE * max(limit, 0)) // self._states.arena.block_bytes

    def take_over(self, row: KVRow, nodes: Sequence[PrefixNode]) -> Sequence[PrefixNode]:
        """Of the nodes that follow a row's registered blocks, those up to the last checkpoint beyond its own tokens,
        which becomes the row's state. Empty if there is no such checkpoint."""
        usable = [
            number
            for number, node in enumerate(nodes, 1)
            if self.at(node) != FREED and node.depth * BLOCK_TOKENS > row.computed
        ]
        return nodes[: usable[-1]] if usable and self.copy(self.at(nodes[usable[-1] - 1]), row) else ()

    def restore(self, node: PrefixNode, arrays: Sequence[Bytes]) -> bool:
        """Gives a node a checkpoint that was read from the disk. Returns False if there is no room for it."""
        if self.at(node) != FREED:
            return True
        if not self._memory.make_room({self._states: 1}) or not node.alive:
            return False
        (block_id,) = self._states.allocator.allocate(1)
        try:
            self._states.arena.from_host(block_id, arrays)
            self._memory.index.cache(node, self._states.number, block_id)
        finally:
            self._states.allocator.release(block_id)
        return True
