"""The memory of the KV pool: one arena for each layer group, all within the bytes that `core.DeviceMemory` allows.

When a row needs blocks, free places are taken first, then the arena grows, then cached prefixes are evicted, then the
other groups give up places that they do not need. If that is not enough, rows give way; see `core.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import mlx.core as mx

from mlx_parallm.batch.kv.blocks import FREED, blocks_for
from mlx_parallm.batch.kv.groups import LayerGroup, Store, layer_groups, state_group, tail_group
from mlx_parallm.batch.kv.prefix import LAST_BLOCK, Node, PrefixIndex
from mlx_parallm.batch.kv.row import KVRow
from mlx_parallm.batch.kv.sizing import places_kept_in_excess, spare_places
from mlx_parallm.core import DeviceMemory
from mlx_parallm.model.device import is_out_of_memory
from mlx_parallm.model.layer_state import KVLayout


class BlockMemory:
    """Arenas, their places, and the prefix index over them.

    Attributes:
        groups: layer groups.
        states: the states of recurrent layers, one for each row and checkpoint; None if there are no such layers.
        tails: the last block of each row in full precision, if full blocks are quantized; otherwise None.
        stores: `groups`, and `states` and `tails` if there are any: all that takes memory. The index counts `groups`
            and `states`.
        rows: live rows, in the order in which they were opened.
        tentative: the blocks with a tentative checkpoint, the oldest first; see `row_states`. Some may have lost it.
        control_ids: tokens that can end a message of a chat.
        evictions: cached blocks that were dropped to make room.

    Args:
        layout: shapes and dtype of one token's keys and values.
        device: says how many bytes all arenas may take. While one is resized, they may take one layer more.
    """

    def __init__(self, layout: KVLayout, device: DeviceMemory) -> None:
        self.layout = layout
        self.device = device
        self.evictions = 0
        self.control_ids: Collection[int] = frozenset()
        self.clear()

    def clear(self) -> None:
        """Drops all rows, arrays and cached prefixes."""
        self._refused_at: float = math.inf  # bytes used when the device last refused to grow an arena
        self._refusal: Exception | None = None
        self.rows: dict[KVRow, None] = {}
        self.tentative: dict[Node, None] = {}
        self.groups = layer_groups(self.layout)
        self.states, self.tails = state_group(self.layout), tail_group(self.layout)
        self.stores: list[Store] = [*self.groups, *(each for each in (self.states, self.tails) if each is not None)]
        places, windows = [group.places for group in self.groups], [group.window for group in self.groups]
        if self.states is not None:
            places, windows = [*places, self.states.places], [*windows, LAST_BLOCK]
        self.index = PrefixIndex(places, windows)

    # -- figures ---------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in every group."""
        return sum(group.arena.block_bytes for group in self.groups)

    @property
    def states_number(self) -> int:
        """The number of `states` in `stores` and in the index."""
        return len(self.groups)

    @property
    def _own(self) -> list[Store]:
        """The stores in which each row has one place of its own."""
        return self.stores[len(self.groups) :]

    @property
    def own_bytes(self) -> int:
        """Bytes that a row takes beside its blocks: its state, and its last block in full precision."""
        return sum(store.arena.block_bytes for store in self._own)

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return sum(group.arena.block_bytes * group.places.total for group in self.stores)

    @property
    def array_bytes(self) -> int:
        """Bytes of all arrays: more than `nbytes` while an arena is resized, layer by layer."""
        return sum(group.arena.array_bytes for group in self.stores)

    @property
    def bytes_free(self) -> int:
        """Bytes that neither rows nor cached prefixes use."""
        return self.array_bytes - self.bytes_used - self.bytes_cached

    @property
    def bytes_cached(self) -> int:
        """Bytes of blocks of cached prefixes that no row reads."""
        return sum(group.arena.block_bytes * group.places.cached for group in self.stores)

    @property
    def bytes_used(self) -> int:
        """Bytes of blocks that rows read."""
        return sum(group.arena.block_bytes * group.places.used for group in self.stores)

    # -- rows ------------------------------------------------------------------------------------

    def add(self, row: KVRow) -> None:
        """Adds a row without blocks."""
        row.reset(len(self.groups))
        self.rows[row] = None

    def tables(self, row: KVRow) -> zip[tuple[LayerGroup, list[int]]]:
        """The layer groups, each with the row's table."""
        return zip(self.groups, row.tables, strict=True)

    def share(self, row: KVRow, tables: Sequence[list[int]]) -> None:
        """Appends blocks of other rows or of cached prefixes to a row's tables."""
        for (group, table), places in zip(self.tables(row), tables, strict=True):
            for place in places:
                if place != FREED:
                    group.places.acquire(place)
            table += places

    def close(self, row: KVRow) -> None:
        """Removes a row. It lets go of its last block first, so that a prefix is evicted from its end."""
        for group, table in self.tables(row):
            for place in reversed(table):
                if place != FREED:
                    group.places.release(place)
        for store, places in self._own_places(row):
            for place in places:
                store.places.release(place)
        row.reset(0)
        del self.rows[row]

    def _own_places(self, row: KVRow) -> Iterator[tuple[Store, list[int]]]:
        """The places that a row has in `states` and `tails`."""
        if self.states is not None:
            yield self.states, [place for place in (row.state, *row.checkpoints.values()) if place != FREED]
        if self.tails is not None:
            yield self.tails, [row.tail] if row.tail != FREED else []

    # -- room ------------------------------------------------------------------------------------

    def make_room(self, blocks: int, alone: bool, own: int = 0) -> bool:
        """Makes places free. If that is not possible, no cached prefix is evicted.

        Args:
            blocks: how many places each group needs.
            alone: there is no other row, so all of the budget may be used, and no memory will be freed later.
            own: how many places `states` and `tails` need.

        Returns:
            False if the budget is spent, or if the device is out of memory and other rows will free some.

        Raises:
            Exception: the device's own error, in all other cases where it fails. Rows are unchanged.
        """
        return self._make_room([*(blocks for _ in self.groups), *(own for _ in self._own)], alone)

    def make_room_for_checkpoint(self) -> bool:
        """Makes one place of `states` free, as `make_room` does for a row that is not alone. Returns False if there are
        no such layers."""
        return self.states is not None and self._make_room(
            [int(store is self.states) for store in self.stores], alone=False
        )

    def _make_room(self, needs: Sequence[int], alone: bool) -> bool:
        """See `make_room`. `needs`: how many places each of `stores` needs."""
        each = list(zip(self.stores, needs, strict=True))
        if all(group.places.free >= need for group, need in each):
            return True
        missing = sum(max(0, need - group.places.free) * group.arena.block_bytes for group, need in each)
        self.device.ask_others(missing, must=False)
        used = sum((group.places.used + need) * group.arena.block_bytes for group, need in each)
        if used > self.device.pool_limit(alone):
            self.device.ask_others(missing, must=True)
        limit = self.device.pool_limit(alone)
        if used > limit:
            return False
        self._refusal = None
        if alone:
            self._refused_at = math.inf
        if all(self._make_room_in(number, needs, limit) for number in range(len(self.stores))):
            return True
        if alone and self._refusal is not None:
            raise self._refusal
        return False

    def missing(self, row: KVRow, tokens: int, alone: bool) -> int:
        """Bytes that other rows have to give back before `row` has room for `tokens` tokens, when all cached prefixes
        have been evicted; 0 or less if none."""
        blocks = max(0, blocks_for(tokens) - len(row.tables[0]))
        return self.bytes_used + blocks * self.block_bytes - self.device.pool_limit(alone)

    @property
    def device_refused(self) -> bool:
        """Whether the device had no memory when more blocks were last wanted."""
        return self._refusal is not None or self._refused_at != math.inf

    def _make_room_in(self, number: int, needs: Sequence[int], limit: int) -> bool:
        group, need = self.stores[number], needs[number]
        self._grow(group, need, self.device.pool_limit(alone=False))
        self.evict(number, need - group.places.free)
        if group.places.free < need:
            self._take_from_others(number, needs, limit)
            self._grow(group, need, limit)
        return group.places.free >= need

    def _grow(self, group: Store, need: int, limit: int) -> None:
        """Grows an arena so that `need` places are free, or as far as the limit and the device allow."""
        missing = need - group.places.free
        room = (limit - self.nbytes) // group.arena.block_bytes
        if missing <= 0 or room <= 0 or self.bytes_used >= self._refused_at:
            return
        total = group.places.total
        in_excess = self.nbytes + missing * group.arena.block_bytes > self.device.pool_limit(alone=False)
        spare = places_kept_in_excess(total) if in_excess else max(0, group.arena.goal - total) or spare_places(group)
        for more in dict.fromkeys((min(room, max(missing, spare)), min(room, missing))):
            if self.resize(group, total + more):
                return

    def resize(self, group: Store, total: int, most_bytes: float = math.inf) -> bool:
        """Grows or shrinks a group. Returns whether it is done. If the device is out of memory, nothing has grown."""
        try:
            done = group.arena.resize(total, most_bytes)
            if done:
                self._refused_at, self._refusal = math.inf, None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            mx.clear_cache()
            self._refused_at, self._refusal, done = self.bytes_used, error, False
            with suppress(RuntimeError, MemoryError):
                group.arena.resize(group.arena.blocks)  # gives back the layers that have grown
        group.places.resize(group.arena.blocks)
        return done

    def _take_from_others(self, number: int, needs: Sequence[int], limit: int) -> None:
        """Shrinks the arenas of other groups, so that this one may grow."""
        group = self.stores[number]
        short = (needs[number] - group.places.free) * group.arena.block_bytes - (limit - self.nbytes)
        for other, (donor, need) in enumerate(zip(self.stores, needs, strict=True)):
            wanted = -(-short // donor.arena.block_bytes)
            if donor is group or wanted <= 0:
                continue
            self.evict(other, wanted - max(0, donor.places.free - need))
            given = min(wanted, donor.places.free - need)
            total = donor.places.total - given
            if given > 0 and self.move_below(donor, total, most=donor.places.total) and self.resize(donor, total):
                short -= given * donor.arena.block_bytes

    def evict(self, group: int, count: int) -> int:
        """Frees up to `count` cached places of one of the `stores`, the least recently used first. Returns how many."""
        if self.stores[group] is self.tails:
            return 0
        freed = self.index.evict(group, count)
        self.evictions += freed
        return freed

    def copy(self, group: Store, sources: Sequence[int], targets: Sequence[int]) -> bool:
        """Copies blocks of a group. Returns False if the device is out of memory."""
        try:
            group.arena.copy(sources, targets)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            mx.clear_cache()
            self._refusal = error
            return False
        return True

    def move_below(self, group: Store, total: int, most: int) -> bool:
        """Moves up to `most` blocks from places at or above `total` to lower ones.

        Returns False if the device is out of memory; then nothing has changed.
        """
        if moves := group.places.moves_below(total, most):
            if not self.copy(group, [source for source, _ in moves], [target for _, target in moves]):
                return False
            self._rename(group, dict(moves))
        return True

    def _rename(self, group: Store, targets: dict[int, int]) -> None:
        """Replaces the places of moved blocks in all tables and nodes that name them."""
        number = self.stores.index(group)
        for row in self.rows:
            if group is self.tails:
                row.tail = targets.get(row.tail, row.tail)
            elif group is self.states:
                row.state = targets.get(row.state, row.state)
                row.checkpoints = {at: targets.get(place, place) for at, place in row.checkpoints.items()}
            else:
                row.tables[number][:] = [targets.get(place, place) for place in row.tables[number]]
        for source, target in targets.items():
            group.places.move(source, target)
            if (owner := group.places.owners.get(target)) is not None:
                owner.places[number] = target

    # -- checks ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError if tables, places, the index and the arenas disagree."""
        for number, group in enumerate(self.stores):
            counts = [0] * group.places.total
            for row in self.rows:
                own = dict(self._own_places(row))
                for place in own[group] if group in own else row.tables[number]:
                    if place != FREED:
                        counts[place] += 1
            assert counts == group.places.references
            assert group.arena.blocks == group.places.total
            group.places.check_integrity()
        self.index.check_integrity()
        assert self.nbytes <= self.device.budget_bytes, (self.nbytes, self.device.budget_bytes)
