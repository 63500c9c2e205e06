"""The memory of the KV pool: one arena for each layer group, all within the bytes that `DeviceMemory` allows.

When a row needs blocks, free ones are taken first, then the arena grows, then cached prefixes are evicted, then the
other groups give up blocks that they do not need. If that is not enough, rows give way; see `device_memory`. Between
two units, `tidy` resizes arenas a part at a time, so that rows wait for it for a short time only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import mlx.core as mx

from mlx_parallm.kv.arena import Arena
from mlx_parallm.kv.blocks import FREED, BlockAllocator
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.kv.prefix import LAST_BLOCK, PrefixIndex, PrefixNode
from mlx_parallm.kv.row import KVRow
from mlx_parallm.kv.states import StateArena
from mlx_parallm.model.device import is_out_of_memory
from mlx_parallm.model.layer_state import KVLayout

_SPARE_BLOCKS, _IDLE_SPARE_BLOCKS = 4, 16
"""The least number of free blocks for the next rows: while rows run, and without any."""

_SPARE_BYTES = 256 << 20
"""The most bytes of these, because a recurrent state can be large. One block is kept in any case."""

_SPARE_BYTES_FOR_CACHE = 1 << 30

_EVICTED_BLOCKS = 512
"""Cached blocks of each store that are evicted at a time while the machine is short of memory."""

_LARGEST_SLACK = 1 / 8
"""Free memory that arenas keep then, as a share of what rows use. With less, they would be resized all the time."""


A = TypeVar("A", bound=Arena | StateArena)


@dataclass(eq=False, slots=True, kw_only=True)
class Store(Generic[A]):
    """Arrays of one kind with the same block ids, and the allocator of these.

    number: of this store in `KVMemory.stores`, of its table in each row, and of its group in the prefix index.
    window: tokens that a token attends to in these layers; None: all.
    layers: by their indices in the model.
    one_each: whether a row has one block here, however long it is.
    """

    number: int
    arena: A
    window: int | None
    layers: tuple[int, ...]
    one_each: bool = False
    allocator: BlockAllocator[PrefixNode] = field(default_factory=BlockAllocator)

    def block_of(self, row: KVRow) -> int:
        """The only block of a row, if rows have one here."""
        (block_id,) = row.tables[self.number]
        return block_id

    def lacks(self, row: KVRow, blocks: int) -> int:
        """How many more blocks a row needs here, if its tokens fill `blocks` blocks."""
        return max(0, (1 if self.one_each else blocks) - len(row.tables[self.number]))

    def allocate(self, row: KVRow, count: int) -> None:
        """Gives a row so many of the free blocks."""
        table = row.tables[self.number]
        table += self.allocator.allocate(count, after=table[-1] if table else FREED)

    # -- size ------------------------------------------------------------------------------------

    def spare_blocks(self) -> int:
        """How many free blocks the arena gets for the next rows.

        What rows do not use counts against them, so their part is small: a sixteenth, or a few. The cache grows until
        it fills its memory, and the arena copies itself whenever it grows: so the cache gets as many blocks again, up
        to a gigabyte or half of what it has. With a fixed number, a large arena would be copied as often as a small
        one.
        """
        used, cached = self.allocator.used, self.allocator.cached
        for_cache = min(cached, max(_SPARE_BYTES_FOR_CACHE // self.arena.block_bytes, cached // 2))
        return max(self._few(_SPARE_BLOCKS if used else _IDLE_SPARE_BLOCKS), used // 16 + for_cache)

    def _few(self, blocks: int) -> int:
        """So many blocks, or as many as `_SPARE_BYTES` hold."""
        return min(blocks, max(1, _SPARE_BYTES // self.arena.block_bytes))

    @property
    def is_growing(self) -> bool:
        """Whether some layers have grown already. Until the others have too, rows get the blocks of cached prefixes,
        and need not wait for that."""
        return self.arena.goal > self.allocator.total

    def is_short(self) -> bool:
        """Whether so few blocks are free that the next rows may have to wait for more."""
        free = self.allocator.free + (self.allocator.cached if self.is_growing else 0)
        return free < max(self._few(_IDLE_SPARE_BLOCKS), self.spare_blocks() // 16)

    def kept_in_excess(self) -> int:
        """How many free blocks the arena may keep while the pool takes more than its share of the memory."""
        return self.allocator.total // 32

    def size_for_next_rows(self, quiet: bool, most: int) -> int:
        """How many blocks the arena should have, if it may have up to `most`.

        Growth that has begun is completed. The arena grows when an eighth of the spare blocks is left, or half of them
        if no row runs, and shrinks when it has twice as many, because either copies all of its content.

        Args:
            quiet: no row has opened for a while. Then rows hold little more than they use, and without rows and cached
                prefixes nothing is held.
        """
        blocks = self.allocator
        busy = blocks.used + blocks.cached
        if blocks.total < self.arena.goal <= most:
            return self.arena.goal
        if quiet and (blocks.used or not blocks.cached):
            return min(blocks.total, busy + blocks.used // 16)
        spare = self.spare_blocks()
        if blocks.free > max(self._few(_IDLE_SPARE_BLOCKS) if blocks.cached else 0, 2 * spare):
            return busy + spare
        if busy and blocks.free < spare // (8 if blocks.used else 2):
            return max(blocks.total, min(most, busy + spare))
        return blocks.total


LayerGroup = Store[Arena]
"""The layers that have the same sliding window, or all of them in the tails."""

StateGroup = Store[StateArena]
"""The recurrent layers or opaque caches. Besides its state, each row has the checkpoints here that no node has yet."""

AnyStore = LayerGroup | StateGroup


class KVMemory:
    """Arenas, their blocks, and the prefix index over them.

    Attributes:
        groups: layer groups. The one that attends to all tokens is first; then the widest window. A model without
            attention has one group without layers.
        states: the states of recurrent layers, one for each row and checkpoint; None if there are no such layers.
        tails: all layers, with the last block of each row in full precision, if full blocks are quantized; otherwise
            None.
        stores: `groups`, and `states` and `tails` if there are any: all that takes memory. The index counts `groups`
            and `states`.
        rows: live rows, in the order in which they were opened.
        evictions: cached blocks that were dropped to make room.

    Args:
        layout: shapes and dtype of one token's keys and values.
        device: says how many bytes all arenas may take. While one is resized, they may take one layer more.
    """

    def __init__(self, layout: KVLayout, device: DeviceMemory) -> None:
        self.layout = layout
        self.device = device
        self.evictions = 0
        self.clear()

    def clear(self) -> None:
        """Drops all rows, arrays and cached prefixes. Used after a failed unit, whose arrays may be wrong."""
        self._refused_at: float = math.inf  # bytes used when the device last refused to grow an arena
        self._refusal: Exception | None = None
        self.rows: dict[KVRow, None] = {}
        windows = {spec.window for spec in self.layout.attention.values()} or {None}
        in_order = sorted(windows, key=lambda window: -math.inf if window is None else -window)
        self.groups = [self._layer_group(number, window) for number, window in enumerate(in_order)]
        self.states = self._state_group()
        self.tails = self._tail_group()
        own = [store for store in (self.states, self.tails) if store is not None]
        self.stores: list[AnyStore] = [*self.groups, *own]
        indexed = [store for store in self.stores if store is not self.tails]
        self.index = PrefixIndex([store.allocator for store in indexed], [store.window for store in indexed])

    def _layer_group(self, number: int, window: int | None) -> LayerGroup:
        layers = tuple(layer for layer, spec in self.layout.attention.items() if spec.window == window)
        stored, bytes_elsewhere = self.layout.stored, 0 if layers else self.layout.bytes_per_token
        arena = Arena([stored.attention[layer] for layer in layers], stored.dtype, bytes_elsewhere)
        return LayerGroup(number=number, arena=arena, window=window, layers=layers)

    def _state_group(self) -> StateGroup | None:
        if not (layers := self.layout.states):
            return None
        arena = StateArena(list(layers.values()))
        return StateGroup(number=len(self.groups), arena=arena, window=LAST_BLOCK, layers=tuple(layers), one_each=True)

    def _tail_group(self) -> LayerGroup | None:
        if self.layout.bits is None:
            return None
        layers, number = self.layout.attention, len(self.groups) + (self.states is not None)
        arena = Arena(list(layers.values()), self.layout.dtype)
        return LayerGroup(number=number, arena=arena, window=None, layers=tuple(layers), one_each=True)

    def block_ids(self, store: AnyStore, row: KVRow) -> list[int]:
        """All blocks that a row has in a store, in order. Some may be FREED."""
        return [*row.tables[store.number], *(row.checkpoints.values() if store is self.states else ())]

    # -- figures ---------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in every group."""
        return sum(group.arena.block_bytes for group in self.groups)

    @property
    def own_bytes(self) -> int:
        """Bytes that a row takes beside its blocks: its state, and its last block in full precision."""
        return sum(store.arena.block_bytes for store in self.stores[len(self.groups) :])

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(store.arena.block_bytes * store.allocator.total for store in self.stores)

    @property
    def bytes_used(self) -> int:
        """Bytes of blocks that rows read."""
        return sum(store.arena.block_bytes * store.allocator.used for store in self.stores)

    @property
    def bytes_cached(self) -> int:
        """Bytes of blocks of cached prefixes that no row reads."""
        return sum(store.arena.block_bytes * store.allocator.cached for store in self.stores)

    @property
    def bytes_held(self) -> int:
        """Bytes of all blocks except those that only cached prefixes need: blocks that rows read, and free ones."""
        return self.nbytes - self.bytes_cached

    @property
    def bytes_free(self) -> int:
        """Bytes of the arrays that neither rows nor cached prefixes use. While an arena is resized, layer by layer, the
        arrays have more than `nbytes`."""
        return sum(store.arena.array_bytes for store in self.stores) - self.bytes_used - self.bytes_cached

    @property
    def device_refused(self) -> bool:
        """Whether the device had no memory when more blocks were last wanted."""
        return self._refusal is not None or self._refused_at != math.inf

    def arrays(self) -> list[mx.array]:
        """The keys, values and states of all layers."""
        return [array for store in self.stores for array in store.arena.arrays()]

    def state_arrays(self) -> list[mx.array]:
        """The recurrent states, and the keys and values that are not in the blocks yet. Not all logits depend on those
        that a pass makes, so they are evaluated with them."""
        pending = [array for group in self.groups for array in group.arena.pending_arrays()]
        return pending if self.states is None else pending + self.states.arena.arrays()

    # -- room ------------------------------------------------------------------------------------

    def make_room(self, needs: Mapping[AnyStore, int], alone: bool = False) -> bool:
        """Makes blocks free. If that is not possible, no cached prefix is evicted.

        Args:
            needs: how many blocks of each store.
            alone: there is no other row, so all of the budget may be used, and no memory will be freed later.

        Returns:
            False if the budget is spent, or if the device is out of memory and other rows will free some.

        Raises:
            Exception: the device's own error, in all other cases where it fails. Rows are unchanged.
        """
        if all(store.allocator.free >= need for store, need in needs.items()):
            return True
        missing = sum(max(0, n - store.allocator.free) * store.arena.block_bytes for store, n in needs.items())
        self.device.ask_others(missing, must=False)
        used = self.bytes_used + sum(need * store.arena.block_bytes for store, need in needs.items())
        if used > self.device.pool_limit(alone):
            self.device.ask_others(missing, must=True)
        limit = self.device.pool_limit(alone)
        if used > limit:
            return False
        self._refusal = None
        if alone:
            self._refused_at = math.inf
        if all(self._make_room_in(store, needs, limit) for store in needs):
            return True
        if alone and self._refusal is not None:
            raise self._refusal
        return False

    def _make_room_in(self, store: AnyStore, needs: Mapping[AnyStore, int], limit: int) -> bool:
        need = needs[store]
        if store.is_growing:
            self.evict(store, need - store.allocator.free)
        self._grow(store, need, self.device.pool_limit(alone=False))
        self.evict(store, need - store.allocator.free)
        if store.allocator.free < need:
            self._take_from_others(store, needs, limit)
            self._grow(store, need, limit)
        return store.allocator.free >= need

    def _grow(self, store: AnyStore, need: int, limit: int) -> None:
        """Grows an arena so that `need` blocks are free, or as far as the limit and the device allow."""
        missing = need - store.allocator.free
        room = (limit - self.nbytes) // store.arena.block_bytes
        if missing <= 0 or room <= 0 or self.bytes_used >= self._refused_at:
            return
        total = store.allocator.total
        in_excess = self.nbytes + missing * store.arena.block_bytes > self.device.pool_limit(alone=False)
        spare = store.kept_in_excess() if in_excess else max(0, store.arena.goal - total) or store.spare_blocks()
        for more in dict.fromkeys((min(room, max(missing, spare)), min(room, missing))):
            if self.resize(store, total + more):
                return

    def resize(self, store: AnyStore, total: int, most_bytes: float = math.inf) -> bool:
        """Grows or shrinks an arena. Returns whether it is done. If the device is out of memory, nothing has grown."""
        try:
            done = store.arena.resize(total, most_bytes)
            if done:
                self._refused_at, self._refusal = math.inf, None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            mx.clear_cache()
            self._refused_at, self._refusal, done = self.bytes_used, error, False
            store.allocator.resize(store.arena.blocks)
            self.shrink(store)  # gives back the layers that have grown
        store.allocator.resize(store.arena.blocks)
        return done

    def shrink(self, store: AnyStore, most_bytes: float = math.inf) -> bool:
        """Shrinks some layers of an arena to its blocks. Returns whether no more can be done."""
        try:
            return store.arena.resize(store.allocator.total, most_bytes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            mx.clear_cache()
            return True

    def _take_from_others(self, store: AnyStore, needs: Mapping[AnyStore, int], limit: int) -> None:
        """Shrinks the arenas of other stores, so that this one may grow."""
        short = (needs[store] - store.allocator.free) * store.arena.block_bytes - (limit - self.nbytes)
        for donor in self.stores:
            wanted = -(-short // donor.arena.block_bytes)
            if donor is store or wanted <= 0:
                continue
            need = needs.get(donor, 0)
            self.evict(donor, wanted - max(0, donor.allocator.free - need))
            given = min(wanted, donor.allocator.free - need)
            total = donor.allocator.total - given
            if given > 0 and self._move_below(donor, total, donor.allocator.total) and self.resize(donor, total):
                short -= given * donor.arena.block_bytes

    def evict(self, store: AnyStore, count: int) -> int:
        """Frees up to `count` cached blocks of a store, the least recently used first. Returns how many. States at the
        end of blocks go with them."""
        if store is self.tails:
            return 0
        freed = self.index.evict(store.number, count)
        self.evictions += freed
        return freed

    def copy(self, store: AnyStore, sources: Sequence[int], targets: Sequence[int]) -> bool:
        """Copies blocks of a store. Returns False if the device is out of memory."""
        try:
            store.arena.copy(sources, targets)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            mx.clear_cache()
            self._refusal = error
            return False
        return True

    def _move_below(self, store: AnyStore, total: int, most: int) -> bool:
        """Moves up to `most` blocks from ids at or above `total` to lower ones, in all tables and nodes that have them.

        Returns False if the device is out of memory; then nothing has changed.
        """
        moves = store.allocator.moves_below(total, most)
        if moves and not self.copy(store, [source for source, _ in moves], [target for _, target in moves]):
            return False
        targets = dict(moves)
        for row in self.rows if moves else ():
            table = row.tables[store.number]
            table[:] = [targets.get(block_id, block_id) for block_id in table]
            if store is self.states:
                row.checkpoints = {depth: targets.get(kept, kept) for depth, kept in row.checkpoints.items()}
        for source, target in moves:
            store.allocator.move(source, target)
            if (node := store.allocator.cached_by.get(target)) is not None:
                node.block_ids[store.number] = target
        return True

    # -- between units ---------------------------------------------------------------------------

    def tidy(self, most_bytes: int, quiet: bool = False, pausing: bool = False) -> bool:
        """Grows arenas that are short of free blocks, so that the next row need not wait for that. Shrinks arenas of
        which much is unused, after the blocks with the highest ids have moved.

        Cached prefixes are evicted first where the arenas hold memory that was reserved meanwhile. While the machine is
        short of memory, all of them are.

        Args:
            most_bytes: bytes that may be copied in each store now. At least one block is moved, or one layer resized.
            quiet: no row has opened for a while.
            pausing: do only what is urgent, because the last row has ended just now and the next may come at once, or
                rows have waited enough. Urgent: an arena is short of blocks, or memory was reserved meanwhile.

        Returns:
            Whether more is left to do.
        """
        excess = self.nbytes - self.device.pool_limit(alone=False)
        reserved, evicted = excess > 0, 0
        if not self.device.keeps_prefixes:
            evicted = sum(self.evict(store, _EVICTED_BLOCKS) for store in self.stores)
            quiet = quiet or self.bytes_free > _LARGEST_SLACK * self.bytes_used
        for store in self.stores:
            wanted = max(0, -(-excess // store.arena.block_bytes))
            self.evict(store, wanted - store.allocator.free)
            excess -= min(wanted, store.allocator.free) * store.arena.block_bytes
        stores = [store for store in self.stores if reserved or not pausing or store.is_short()]
        left = [self._tidy_store(store, most_bytes, quiet) for store in stores]
        return any(left) or evicted > 0

    def _tidy_store(self, store: AnyStore, most_bytes: int, quiet: bool) -> bool:
        size = self._wanted_size(store, quiet)
        if size > store.allocator.total:
            return not self.resize(store, size, most_bytes) and not self.device_refused
        if not self.shrink(store, most_bytes):
            return True
        most_blocks = max(1, most_bytes // store.arena.block_bytes)
        if size == store.allocator.total or not self._move_below(store, size, most_blocks):
            return False
        if store.allocator.moves_below(size, 1):
            return True
        store.allocator.resize(size)
        return not self.shrink(store, most_bytes)

    def _wanted_size(self, store: AnyStore, quiet: bool) -> int:
        """How many blocks an arena should have now. It does not grow while the device is out of memory."""
        blocks = store.allocator
        room = self.device.pool_limit(alone=False) - self.nbytes
        if room < 0:
            return blocks.total - blocks.free if blocks.free > store.kept_in_excess() else blocks.total
        growth = 0 if self.device_refused else room // store.arena.block_bytes
        return store.size_for_next_rows(quiet, blocks.total + growth)

    # -- checks ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError if rows, blocks, the index, the arenas and the budget disagree."""
        for store in self.stores:
            counts = [0] * store.allocator.total
            for block_id in (id for row in self.rows for id in self.block_ids(store, row) if id != FREED):
                counts[block_id] += 1
            assert counts == store.allocator.references
            assert store.arena.blocks == store.allocator.total
            store.allocator.check_integrity()
        self.index.check_integrity()
        assert self.nbytes <= self.device.budget_bytes, (self.nbytes, self.device.budget_bytes)
