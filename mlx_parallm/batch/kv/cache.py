"""The KV pool: rows of keys and values in blocks of 64 tokens, which rows and cached prefixes share by reference.

    row A   [ 0 ][ 1 ][ 2 ][ 5 ]          blocks 0 and 1 are frozen: registered in the prefix index, and never written
    row B   [ 0 ][ 1 ][ 3 ]               again. Blocks 2, 3 and 5 each belong to one row.
    cached  [ 0 ][ 4 ]                    no row reads block 4; it is kept until its memory is needed.

Recurrent layers keep a state instead; see `row_states`.

With `KVLayout.bits`, blocks are quantized. A row writes into its tail, a block in full precision; when that is full, it
is quantized into the row's table. A token attends to its own block in full precision and to the blocks before it as
they are quantized, however its row is cut into chunks.

The invariant for writing: after `extend(row, tokens)` has returned True, every block that holds a position in
[row.computed, tokens) belongs to this row alone and is not frozen.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Sequence

import mlx.core as mx

from mlx_parallm.batch.kv.arena import Bytes
from mlx_parallm.batch.kv.block_files import BlockName, HostBlock
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS, FREED, blocks_for
from mlx_parallm.batch.kv.groups import LayerGroup, StateGroup, Store
from mlx_parallm.batch.kv.host_blocks import restore, to_host, to_read, unsaved
from mlx_parallm.batch.kv.memory import BlockMemory
from mlx_parallm.batch.kv.prefix import Node, first_visible
from mlx_parallm.batch.kv.row import KVRow
from mlx_parallm.batch.kv.row_blocks import ancestor, copy_start, fork, holds, kept, make_private, reserve
from mlx_parallm.batch.kv.row_prefixes import attach, freeze, freeze_tail, take_over
from mlx_parallm.batch.kv.row_states import begin, reserve_checkpoint
from mlx_parallm.batch.kv.tidy import tidy
from mlx_parallm.core import Account, DeviceMemory
from mlx_parallm.model.layer_state import KVLayout

__all__ = ["KVRow", "LayerGroup", "LoRABatchedKVCache"]


class LoRABatchedKVCache:
    """Rows of keys and values within a byte budget, and the prefixes that were computed before.

    Attributes:
        longest_row: tokens of the longest row that fits the budget when it is alone.
        group_of: by layer, the number of its group in `groups`, and its own in the group.
        hits, queries: tokens found in the cache, and tokens of the prompts that were looked up. The caller of `open`
            says which lookups count.

    Args:
        layout: shapes and dtype of one token's keys and values.
        device: says how many bytes the blocks may take. While an arena is resized, they may take more.
        max_length: longest row in tokens.
        keep_prefixes: whether there is a prefix cache. Without one, `open` finds nothing and `freeze` does nothing.
            Opaque caches have none: blocks of several rows would count once what each of them has.
        memory: the blocks; None: new ones of this layout within the memory of `device`.
        control_ids: tokens that can end a message of a chat.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: DeviceMemory,
        max_length: int,
        keep_prefixes: bool = True,
        memory: BlockMemory | None = None,
        control_ids: Collection[int] = frozenset(),
    ) -> None:
        self.layout = layout
        self.max_length = max_length
        self.keep_prefixes = keep_prefixes and not layout.opaque
        self.hits = self.queries = 0
        self.device = device
        self._memory = memory or BlockMemory(layout, device)
        self._memory.control_ids = control_ids
        self.group_of = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        blocks = max(0, device.budget_bytes - self._memory.own_bytes) // self._memory.block_bytes
        self.longest_row = min(max_length, blocks * BLOCK_TOKENS)
        device.open_account(Account.ROWS, lambda: self._memory.bytes_used)
        device.open_account(Account.PREFIXES, lambda: self._memory.bytes_cached)
        device.open_account(Account.FREE_BLOCKS, lambda: self._memory.bytes_free)
        device.give_back = lambda: tidy(self._memory, sys.maxsize, quiet=False)

    # -- rows ------------------------------------------------------------------------------------

    def open(
        self,
        tokens: int,
        root: Hashable | None = None,
        ids: Sequence[int] = (),
        *,
        into: KVRow | None = None,
        counts: bool = True,
    ) -> KVRow | None:
        """Opens a row that can hold `tokens`: `into`, an object that is not open, or a new one.

        `root` names what keys and values depend on besides the tokens, such as the adapter version. With it, the row
        starts with the longest cached beginning of `ids`, and `row.computed` is its length. At least the last
        id is left to compute. `counts`: add this lookup to `hits` and `queries`.

        Returns:
            None if the budget is spent, or if the device is out of memory and live rows will free some.

        Raises:
            ValueError: `tokens` exceeds `max_length`.
            Exception: the device's own error, in all other cases where it fails. Existing rows are unchanged.
        """
        self._check_length(tokens)
        alone = not self._memory.rows
        row = KVRow() if into is None else into
        self._memory.add(row)
        looks_up = root is not None and self.keep_prefixes
        opened = False
        try:
            if looks_up and (partial := attach(self._memory, row, root, ids)) is not None:
                copy_start(self._memory, row, *partial, tokens, alone)
            opened = reserve(self._memory, row, tokens, alone) and begin(self._memory, row)
        finally:
            if not opened:
                self._memory.close(row)
        if not opened and alone and looks_up:
            return self.open(tokens, into=into)  # there is no room for a state beside the checkpoint of it
        if opened and looks_up and counts:
            self.queries += len(ids)
            self.hits += row.computed
        return row if opened else None

    def extend(self, row: KVRow, tokens: int) -> bool:
        """Makes room for `tokens` tokens in all, which the row may then write from `row.computed` on.

        Returns False, and raises, in the same cases as `open` returns None and raises.
        """
        self._check_length(tokens)
        if row.computed % BLOCK_TOKENS and tokens > row.computed and not make_private(self._memory, row):
            return False
        return reserve(self._memory, row, tokens, alone=len(self._memory.rows) == 1)

    def truncate(self, row: KVRow, length: int) -> None:
        """Forgets all tokens from `length` on, and gives back the blocks that are not needed for the others.

        If blocks are quantized and the row has filled the block of that position, all of the block is forgotten:
        `row.computed` is then the number of tokens before it.

        Raises:
            ValueError: as in `fork`.
        """
        self._check_held(row, length)
        length = kept(self._memory, row, length)
        for group, table in zip(self.groups, row.tables, strict=True):
            while len(table) > blocks_for(length):
                if (place := table.pop()) != FREED:
                    group.places.release(place)
        row.computed = length
        row.node = ancestor(row.node, length // BLOCK_TOKENS)

    def fork(self, source: KVRow, length: int, tokens: int, *, into: KVRow | None = None) -> KVRow | None:
        """Opens a row as `open` does, which starts with the first `length` tokens of `source`.

        The two rows share the blocks that are full, and the new one gets a copy of the one that is not. `row.computed`
        may be smaller than `length`, as in `truncate`.

        Raises:
            ValueError: `source` does not have all that the next token of the new row reads; see `holds`.
        """
        self._check_length(max(tokens, length))
        self._check_held(source, length)
        row = KVRow() if into is None else into
        return row if fork(self._memory, source, length, tokens, row) else None

    def holds(self, row: KVRow, length: int) -> bool:
        """Whether `row` still has all that its token at position `length` reads: the blocks that it attends to, and the
        recurrent state before it."""
        return holds(self._memory, row, length)

    def release_windows(self, row: KVRow) -> None:
        """Gives back the blocks that no later token can attend to, in groups with a sliding window.

        Call it after `freeze`, which registers these blocks so that a later prompt may find them.
        """
        for group, table in self._memory.tables(row):
            block = min(first_visible(row.computed, group.window), len(table)) - 1
            while block >= 0 and table[block] != FREED:
                group.places.release(table[block])
                table[block] = FREED
                block -= 1

    def close(self, row: KVRow, root: Hashable | None = None, ids: Sequence[int] = ()) -> None:
        """Removes a row. With `root` and the ids of its tokens, its blocks stay cached, even a partly filled one."""
        if root is not None and self.keep_prefixes:
            freeze(self._memory, row, root, ids)
            freeze_tail(self._memory, row, root, ids)
        self._memory.close(row)

    def clear(self) -> None:
        """Drops all rows, arrays and cached prefixes. Used after a failed unit, whose arrays may be wrong."""
        self._memory.clear()

    # -- cached prefixes -------------------------------------------------------------------------

    def freeze(self, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
        """Registers the row's full blocks, as far as `ids` has their tokens, so that later prompts find them.

        If the index already has a block of the same tokens, which another row computed, the row uses that block and
        gives its own back.
        """
        if self.keep_prefixes:
            freeze(self._memory, row, root, ids)

    def reserve_checkpoint(self, row: KVRow, tokens: int) -> None:
        """Lets the next pass keep the row's recurrent state after `tokens` tokens, where that pass ends, for the prefix
        cache. Does nothing if there is no such state, no memory for it, or no block that ends there."""
        if self.keep_prefixes:
            reserve_checkpoint(self._memory, row, tokens)

    def take_over(self, row: KVRow, root: Hashable, ids: Sequence[int]) -> Hashable:
        """Gives a row, which has not computed all of `ids`, the blocks that other rows have computed since.

        `row.computed` grows by their tokens. At least one id is left to compute.

        Returns:
            A key that rows have in common if they compute the same block next; None if no whole block is left.
        """
        return take_over(self._memory, row, root, ids) if self.keep_prefixes else None

    def cached(self, root: Hashable, ids: Sequence[int]) -> int:
        """How many tokens a row of `ids` would start with, whole blocks only."""
        return len(self._memory.index.find(root, ids)) * BLOCK_TOKENS if self.keep_prefixes else 0

    def evict(self, blocks: int) -> int:
        """Drops cached blocks that no row reads, the least recently used first. Returns how many places became free.
        States at the end of dropped blocks go with them."""
        freed = 0
        for number in range(len(self.groups)):
            freed += self._memory.evict(number, blocks - freed)
        return freed

    def roots(self) -> list[Hashable]:
        """The roots of all chains."""
        return self._memory.index.roots()

    def drop(self, root: Hashable) -> int:
        """Forgets the cached prefixes of a root. Live rows keep their blocks. Returns how many tokens were cached."""
        return self._memory.index.drop(root)

    def reset(self) -> int:
        """Forgets all cached prefixes. Live rows keep their blocks. Returns how many tokens were cached."""
        return self._memory.index.reset()

    def unsaved(self, most: int) -> list[tuple[Node, bool]]:
        """See `host_blocks.unsaved`."""
        return unsaved(self._memory, most)

    def to_host(self, node: Node, is_state: bool) -> list[Bytes]:
        """Copies a cached block, or the state at its end, in the order of `block_files.HostBlock.arrays`."""
        return to_host(self._memory, node, is_state)

    def to_read(self, root: Hashable, ids: Sequence[int], names: Sequence[BlockName]) -> list[BlockName]:
        """See `host_blocks.to_read`."""
        return to_read(self._memory, root, ids, names)

    def restore(self, root: Hashable, ids: Sequence[int], blocks: Sequence[HostBlock]) -> bool:
        """Makes what was read from the disk cached prefixes again; see `host_blocks.restore`."""
        return self.keep_prefixes and restore(self._memory, root, ids, blocks)

    def tidy(self, most_bytes: int, quiet: bool = False, pausing: bool = False) -> bool:
        """Resizes arenas between units; see `tidy.tidy`. Returns whether more is left to do."""
        return tidy(self._memory, most_bytes, quiet, pausing)

    # -- figures ---------------------------------------------------------------------------------

    @property
    def groups(self) -> list[LayerGroup]:
        return self._memory.groups

    @property
    def stores(self) -> list[Store]:
        """All arrays: those of `groups`, and then of `states` and `tails` if there are any."""
        return self._memory.stores

    @property
    def tails(self) -> LayerGroup | None:
        """The last block of each row in full precision, if full blocks are quantized."""
        return self._memory.tails

    @property
    def states(self) -> StateGroup | None:
        """The states of recurrent layers; None if there are no such layers."""
        return self._memory.states

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return self._memory.block_bytes

    @property
    def smallest_budget(self) -> int:
        """Bytes that a row of one block needs."""
        return self._memory.block_bytes + self._memory.own_bytes

    @property
    def device_refused(self) -> bool:
        """Whether the device had no memory when more blocks were last wanted."""
        return self._memory.device_refused

    def missing(self, row: KVRow, tokens: int) -> int:
        """Bytes that other rows have to give back before `extend` finds room for `tokens`; 0 or less if none."""
        return self._memory.missing(row, tokens, alone=len(self._memory.rows) == 1)

    @property
    def bytes_cached(self) -> int:
        """Bytes of cached blocks that no row reads."""
        return self._memory.bytes_cached

    @property
    def bytes_used(self) -> int:
        """Bytes of blocks that rows read."""
        return self._memory.bytes_used

    @property
    def bytes_held(self) -> int:
        """Bytes of all blocks except those that only cached prefixes need: blocks that rows read, and free ones."""
        return self._memory.nbytes - self._memory.bytes_cached

    @property
    def evictions(self) -> int:
        """Cached blocks that were dropped to make room."""
        return self._memory.evictions

    @property
    def tokens_used(self) -> int:
        """Tokens in the blocks that rows read. Tokens of a shared block count once."""
        used: dict[int, int] = {}
        for row in self._memory.rows:
            for block, place in enumerate(row.tables[0][: blocks_for(row.computed)]):
                used[place] = max(used.get(place, 0), min(BLOCK_TOKENS, row.computed - block * BLOCK_TOKENS))
        used.pop(FREED, None)
        return sum(used.values())

    def arrays(self) -> list[mx.array]:
        """The keys, values and states of all layers."""
        return [array for group in self._memory.stores for array in group.arena.arrays()]

    def state_arrays(self) -> list[mx.array]:
        """The recurrent states, and the keys and values that are not in the blocks yet. Not all logits depend on those
        that a pass makes, so they are evaluated with them."""
        pending = [array for group in self.groups for array in group.arena.pending_arrays()]
        return pending if self.states is None else pending + self.states.arena.arrays()

    def rows(self) -> list[KVRow]:
        """Live rows, in the order in which they were opened."""
        return list(self._memory.rows)

    def check_integrity(self) -> None:
        """Raises AssertionError if rows, blocks, cached prefixes and the budget disagree."""
        self._memory.check_integrity()
        for row in self._memory.rows:
            frozen = row.node.depth if row.node is not None and row.node.alive else 0
            assert frozen * BLOCK_TOKENS <= row.computed
            assert len({len(table) for table in row.tables}) == 1
            assert row.computed <= len(row.tables[0]) * BLOCK_TOKENS
            assert self.holds(row, row.computed)
            for number, (group, table) in enumerate(self._memory.tables(row)):
                assert FREED not in table[table.count(FREED) :], "blocks are given back from the beginning"
                assert all(group.places.is_private(place) for place in table[blocks_for(row.computed) :])
                if frozen and row.node is not None:
                    assert table[frozen - 1] in (FREED, row.node.places[number])

    # -- checks of arguments ---------------------------------------------------------------------

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise ValueError(f"a row of {tokens} tokens is longer than the limit of {self.max_length}")

    def _check_held(self, row: KVRow, length: int) -> None:
        if not self.holds(row, length):
            raise ValueError(
                f"a row cannot go on after {length} tokens: a sliding window has given back blocks of them, "
                "or the recurrent state there is gone"
            )
