"""The KV pool: rows of keys and values in blocks of 64 tokens, which rows and cached prefixes share by reference.

    row A   [ 0 ][ 1 ][ 2 ][ 5 ]          blocks 0 and 1 are frozen: registered in the prefix index, and never written
    row B   [ 0 ][ 1 ][ 3 ]               again. Blocks 2, 3 and 5 each belong to one row.
    cached  [ 0 ][ 4 ]                    no row reads block 4; it is kept until its memory is needed.

Recurrent layers keep a state instead; see `states`.

With `KVLayout.bits`, blocks are quantized. A row writes into its tail, a block in full precision; when that is full, it
is quantized into the row's table. A token attends to its own block in full precision and to the blocks before it as
they are quantized, however its row is cut into chunks.

The invariant for writing: after `extend(row, tokens)` has returned True, every block that holds a position in
[row.computed, tokens) belongs to this row alone and is not frozen.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Sequence

from mlx_parallm.kv.blocks import BLOCK_TOKENS, FREED, blocks_for
from mlx_parallm.kv.device_memory import DeviceMemory, MemoryAccount
from mlx_parallm.kv.memory import AnyStore, KVMemory, LayerGroup
from mlx_parallm.kv.prefix import PrefixNode, first_visible
from mlx_parallm.kv.row import KVRow
from mlx_parallm.kv.states import StateCheckpoints
from mlx_parallm.model.layer_state import KVLayout

__all__ = ["KVRow", "LayerGroup", "LoRABatchedKVCache"]

_WORTH_COPYING = 8
"""Tokens that a partly matching block must save. To compute fewer costs about as much as to copy the block."""


class LoRABatchedKVCache(KVMemory):
    """Rows of keys and values within a byte budget, and the prefixes that were computed before.

    Attributes:
        longest_row: tokens of the longest row that fits the budget when it is alone.
        group_of: by layer, the number of its group in `groups`, and its own in the group.
        checkpoints: of recurrent states; None if there are no such layers.
        hits, queries: tokens found in the cache, and tokens of the prompts that were looked up. The caller of `open`
            says which lookups count.

    Args:
        layout: shapes and dtype of one token's keys and values.
        device: says how many bytes the blocks may take. While an arena is resized, they may take more.
        max_length: longest row in tokens.
        keep_prefixes: whether there is a prefix cache. Without one, `open` finds nothing and `freeze` does nothing.
            Opaque caches have none: blocks of several rows would count once what each of them has.
        control_ids: tokens that can end a message of a chat.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: DeviceMemory,
        max_length: int,
        keep_prefixes: bool = True,
        control_ids: Collection[int] = frozenset(),
    ) -> None:
        self._control_ids = control_ids
        super().__init__(layout, device)
        self.max_length = max_length
        self.keep_prefixes = keep_prefixes and not layout.opaque
        self.hits = self.queries = 0
        self.group_of = {
            layer: (group.number, index) for group in self.groups for index, layer in enumerate(group.layers)
        }
        blocks = max(0, device.budget_bytes - self.own_bytes) // self.block_bytes
        self.longest_row = min(max_length, blocks * BLOCK_TOKENS)
        device.open_account(MemoryAccount.ROWS, lambda: self.bytes_used)
        device.open_account(MemoryAccount.PREFIXES, lambda: self.bytes_cached)
        device.open_account(MemoryAccount.FREE_BLOCKS, lambda: self.bytes_free)
        device.give_back = lambda: self.tidy(sys.maxsize)

    def clear(self) -> None:
        """See `KVMemory.clear`."""
        super().clear()
        self.checkpoints = StateCheckpoints(self, self.states, self._control_ids) if self.states else None

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
        alone = not self.rows
        row = self.add(KVRow() if into is None else into)
        opened, looks_up = False, root is not None and self.keep_prefixes
        try:
            if looks_up:
                self._start_with_prefix(row, root, ids, tokens, alone)
            opened = self._reserve(row, tokens, alone) and (self.checkpoints is None or self.checkpoints.begin(row))
        finally:
            if not opened:
                self.remove(row)
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
        if row.computed % BLOCK_TOKENS and tokens > row.computed and not self._make_private(row):
            return False
        return self._reserve(row, tokens, alone=len(self.rows) == 1)

    def missing(self, row: KVRow, tokens: int) -> int:
        """Bytes that other rows have to give back before `extend` finds room for `tokens`, when all cached prefixes
        have been evicted; 0 or less if none."""
        blocks = self.groups[0].lacks(row, blocks_for(tokens))
        return self.bytes_used + blocks * self.block_bytes - self.device.pool_limit(alone=len(self.rows) == 1)

    def truncate(self, row: KVRow, length: int) -> None:
        """Forgets all tokens from `length` on, and gives back the blocks that are not needed for the others.

        If blocks are quantized and the row has filled the block of that position, all of the block is forgotten:
        `row.computed` is then the number of tokens before it.

        Raises:
            ValueError: as in `fork`.
        """
        self._check_held(row, length)
        length = self._kept(row, length)
        for group, table in zip(self.groups, row.tables, strict=False):
            while len(table) > blocks_for(length):
                if (block_id := table.pop()) != FREED:
                    group.allocator.release(block_id)
        row.computed = length
        row.node = _ancestor(row.node, length // BLOCK_TOKENS)

    def fork(self, source: KVRow, length: int, tokens: int, *, into: KVRow | None = None) -> KVRow | None:
        """Opens a row as `open` does, which starts with the first `length` tokens of `source`.

        The two rows share the blocks that are full, and the new one gets a copy of the one that is not. `row.computed`
        may be smaller than `length`, as in `truncate`.

        Raises:
            ValueError: `source` does not have all that the next token of the new row reads; see `holds`.
        """
        self._check_length(max(tokens, length))
        self._check_held(source, length)
        length = self._kept(source, length)
        whole = length // BLOCK_TOKENS
        row = self.add(KVRow() if into is None else into)
        if not self.layout.opaque:  # else the blocks count what each row has by itself
            self.share(row, [table[:whole] for table in source.tables[: len(self.groups)]])
        forked = False
        try:
            forked = (
                self._reserve(row, max(tokens, length), alone=False)
                and (length % BLOCK_TOKENS == 0 or self._copy_last(source, row, whole))
                and (self.states is None or self._copy_own(self.states, source, row))
            )
        finally:
            if not forked:
                self.remove(row)
        if not forked:
            return None
        row.computed, row.node, row.adapter_slot = length, _ancestor(source.node, whole), source.adapter_slot
        return row

    def holds(self, row: KVRow, length: int) -> bool:
        """Whether `row` still has all that its token at position `length` reads: the blocks that it attends to, and the
        recurrent state before it."""
        if self.states is not None and (length != row.computed or row.to_redo):
            return False
        length = self._kept(row, length)
        visible = [(first_visible(length, group.window), row.tables[group.number]) for group in self.groups]
        return all(first >= blocks_for(length) or table[first] != FREED for first, table in visible)

    def release_windows(self, row: KVRow) -> None:
        """Gives back the blocks that no later token can attend to, in groups with a sliding window.

        Call it after `freeze`, which registers these blocks so that a later prompt may find them.
        """
        for group, table in zip(self.groups, row.tables, strict=False):
            block = min(first_visible(row.computed, group.window), len(table)) - 1
            while block >= 0 and table[block] != FREED:
                group.allocator.release(table[block])
                table[block] = FREED
                block -= 1

    def close(self, row: KVRow, root: Hashable | None = None, ids: Sequence[int] = ()) -> None:
        """Removes a row. With `root` and the ids of its tokens, its blocks stay cached, even a partly filled one."""
        if root is not None and self.keep_prefixes:
            self._freeze_full(row, root, ids)
            self._freeze_tail(row, root, ids)
        self.remove(row)

    # -- blocks of rows --------------------------------------------------------------------------

    def add(self, row: KVRow) -> KVRow:
        """Adds a row without blocks."""
        row.reset(len(self.stores))
        self.rows[row] = None
        return row

    def remove(self, row: KVRow) -> None:
        """Removes a row. It releases its last block first, so that a prefix is evicted from its end."""
        for store in self.stores:
            for block_id in reversed(self.block_ids(store, row)):
                if block_id != FREED:
                    store.allocator.release(block_id)
        row.reset(0)
        del self.rows[row]

    def share(self, row: KVRow, tables: Sequence[list[int]]) -> None:
        """Appends blocks of other rows or of cached prefixes to a row's tables."""
        for group, table, block_ids in zip(self.groups, row.tables, tables, strict=False):
            for block_id in block_ids:
                if block_id != FREED:
                    group.allocator.acquire(block_id)
            table += block_ids

    def _reserve(self, row: KVRow, tokens: int, alone: bool) -> bool:
        """Appends free blocks to a row until it has room for `tokens`, and gives it a tail and a state if it has none.

        Returns False, and raises, as `extend` does. `alone`: no other row is open.
        """
        needs = {store: need for store in self.stores if (need := store.lacks(row, blocks_for(tokens)))}
        if not self.make_room(needs, alone):
            return False
        for store, need in needs.items():
            store.allocate(row, need)
        return True

    def _make_private(self, row: KVRow) -> bool:
        """Makes the partly filled last block of a row its own, if the row was truncated within a frozen block.

        The block is taken out of the prefix index if no other row reads it; otherwise the row gets a copy. Returns
        False as `extend` does.
        """
        last = [
            (group, table[row.computed // BLOCK_TOKENS]) for group, table in zip(self.groups, row.tables, strict=False)
        ]
        if all(group.allocator.is_private(block_id) for group, block_id in last):
            return True
        if all(group.allocator.references[block_id] == 1 for group, block_id in last):
            for group, block_id in last:
                self.index.remove(block_id, group.number)
            return True
        if (copy := self.fork(row, row.computed, row.computed)) is None:
            return False
        row.tables, copy.tables = copy.tables, row.tables
        self.remove(copy)
        return True

    def _kept(self, row: KVRow, length: int) -> int:
        """How many of a row's first `length` tokens can be gone on from.

        That is all of them, if full blocks are not quantized. If they are, a block cannot be written any more once the
        row has tokens after it or has filled it, because its numbers in full precision are gone. Then it is those
        before it.
        """
        if self.tails is None or row.computed // BLOCK_TOKENS == length // BLOCK_TOKENS:
            return length
        return length - length % BLOCK_TOKENS

    def _copy_last(self, source: KVRow, row: KVRow, block: int) -> bool:
        """Copies the partly filled `block` of `source`. Returns False if the device is out of memory."""
        if self.tails is not None:
            return self._copy_own(self.tails, source, row)
        return self._copy_block(source, block, row, block)

    def _copy_own(self, store: AnyStore, source: KVRow, row: KVRow) -> bool:
        """Copies the only block that `source` has in a store. Returns False if the device is out of memory."""
        return self.copy(store, [store.block_of(source)], [store.block_of(row)])

    def _copy_block(self, source: KVRow, block: int, row: KVRow, target: int) -> bool:
        """Copies one block of `source` in all groups. Returns False if the device is out of memory."""
        pairs = zip(self.groups, source.tables, row.tables, strict=False)
        return all(self.copy(group, [table[block]], [own[target]]) for group, table, own in pairs)

    # -- cached prefixes -------------------------------------------------------------------------

    def cached(self, root: Hashable, ids: Sequence[int]) -> int:
        """How many tokens a row of `ids` would start with, whole blocks only."""
        return len(self.index.find(root, ids)) * BLOCK_TOKENS if self.keep_prefixes else 0

    def _start_with_prefix(self, row: KVRow, root: Hashable, ids: Sequence[int], tokens: int, alone: bool) -> None:
        """Gives a new row the longest cached chain of `ids`, and a copy of the block that begins like the rest of them.

        At least the last id is left to compute.
        """
        chain = self.index.find(root, ids)
        row.computed, row.node = len(chain) * BLOCK_TOKENS, chain[-1] if chain else None
        firsts = [first_visible(row.computed, group.window) for group in self.groups]
        self.share(row, [[FREED] * n + [node.block_ids[g] for node in chain[n:]] for g, n in enumerate(firsts)])
        if self.checkpoints is not None:
            self.checkpoints.plan(row, root, ids)
        if self._shares_parts:
            node, common = self.index.find_partial(root, chain, ids)
            if node is not None and common >= _WORTH_COPYING:
                self._copy_start(node, common, row, tokens, alone)

    def _copy_start(self, node: PrefixNode, common: int, row: KVRow, tokens: int, alone: bool) -> None:
        """Copies the first `common` tokens of a cached block to the end of a new row, if there is memory for both."""
        donor = self.add(KVRow())  # keeps the block meanwhile
        self.share(donor, [[block_id] for block_id in node.block_ids])
        try:
            reserved = self._reserve(row, max(tokens, row.computed + common), alone)
            if reserved and self._copy_block(donor, 0, row, row.computed // BLOCK_TOKENS):
                row.computed += common
        finally:
            self.remove(donor)

    def freeze(self, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
        """Registers the row's full blocks, as far as `ids` has their tokens, so that later prompts find them.

        If the index already has a block of the same tokens, which another row computed, the row uses that block and
        gives its own back.
        """
        if self.keep_prefixes:
            self._freeze_full(row, root, ids)

    def _freeze_full(self, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
        """See `freeze`. O(blocks that are not registered yet). A row whose last registered block has left the index
        registers all of its blocks again."""
        node = _last_registered(row)
        whole = min(row.computed, len(ids)) // BLOCK_TOKENS
        if whole <= (node.depth if node else 0):
            return
        node = node or self.index.root(root)
        for start in range(node.depth * BLOCK_TOKENS, whole * BLOCK_TOKENS, BLOCK_TOKENS):
            node = self.index.child(node, tuple(ids[start : start + BLOCK_TOKENS]))
            self._register(row, node)
            if self.checkpoints is not None:
                self.checkpoints.register(row, node)
        row.node = node
        self.index.prune(node)

    def _freeze_tail(self, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
        """Registers the partly filled last block of a row that will not be written again, if rows can go on from
        one."""
        whole = row.computed // BLOCK_TOKENS
        tail = tuple(ids[whole * BLOCK_TOKENS : row.computed])
        if not tail or len(ids) < row.computed or not self._shares_parts:
            return
        parent = _last_registered(row) or self.index.root(root)
        new = parent.depth == whole and tail not in parent.children
        pairs = zip(self.groups, row.tables, strict=False)
        if new and all(group.allocator.is_private(table[whole]) for group, table in pairs):
            self._register(row, self.index.child(parent, tail))
        self.index.prune(parent)

    @property
    def _shares_parts(self) -> bool:
        """Whether a row can go on from the first tokens of a cached block. They do not have the numbers in full
        precision if blocks are quantized, and there is no recurrent state within a block."""
        return self.tails is None and self.states is None

    def _register(self, row: KVRow, node: PrefixNode) -> None:
        """Makes the row and the node of one of its blocks have the same block ids."""
        block = node.depth - 1
        for group, table in zip(self.groups, row.tables, strict=False):
            cached = node.block_ids[group.number]
            if table[block] == FREED:
                continue
            if cached == FREED:
                self.index.cache(node, group.number, table[block])
            elif cached != table[block]:
                group.allocator.acquire(cached)
                group.allocator.release(table[block])
                table[block] = cached

    def reserve_checkpoint(self, row: KVRow, tokens: int) -> None:
        """Lets the next pass keep the row's recurrent state after `tokens` tokens, where that pass ends, for the prefix
        cache. Does nothing if there is no such state, no memory for it, or no block that ends there."""
        if self.keep_prefixes and self.checkpoints is not None:
            self.checkpoints.reserve(row, tokens)

    def keep_before_draft(self, row: KVRow) -> bool:
        """Makes ready for a pass with a draft, of which any token may be forgotten. Returns False if there is no memory
        for that."""
        return self.checkpoints is None or self.checkpoints.keep_before_draft(row)

    def settle_draft(self, row: KVRow, start: int, right: bool) -> None:
        """Call it after the pass, when `row.computed` counts only tokens that were right. `start`: how many the row's
        state had before it. `right`: all of the draft was."""
        if self.checkpoints is not None:
            self.checkpoints.settle_draft(row, start, right)

    def take_over(self, row: KVRow, root: Hashable, ids: Sequence[int], *, counts: bool = False) -> Hashable:
        """Gives a row, which has not computed all of `ids`, the blocks that other rows have computed since.

        `row.computed` grows by their tokens, which `counts` adds to `hits`. At least one id is left to compute.

        Returns:
            A key that rows have in common if they compute the same block next; None if no whole block is left. With
            recurrent layers it is the same for all blocks before the row's next cut, because only that has a
            checkpoint; a unit that brings the row there and is not read yet does not count.
        """
        if not self.keep_prefixes:
            return None
        before = row.computed
        node = _last_registered(row) or self.index.existing_root(root)
        take = self._take_blocks if self.checkpoints is None else self._take_checkpoint
        key = take(row, node, root, ids)
        self.hits += counts * (row.computed - before)
        return key

    def _take_blocks(self, row: KVRow, node: PrefixNode | None, root: Hashable, ids: Sequence[int]) -> Hashable:
        """Gives a row the blocks that follow its last one, `node`. Returns as `take_over` does."""
        depth = node.depth if node else 0
        while (following := _ids_of_block(ids, depth)) is not None and depth == row.computed // BLOCK_TOKENS:
            child = node.children.get(following) if node else None
            if child is None or FREED in child.block_ids:
                break
            self._go_on_from(row, child)
            node, depth = child, child.depth
        return None if following is None else (node or root, following)

    def _take_checkpoint(self, row: KVRow, node: PrefixNode | None, root: Hashable, ids: Sequence[int]) -> Hashable:
        """Gives a row the blocks that follow its last one, `node`, up to the last checkpoint beyond its own tokens, and
        the state there. Returns as `take_over` does."""
        assert self.checkpoints is not None
        following: list[PrefixNode] = []
        while node is not None and (block := _ids_of_block(ids, node.depth)) is not None:
            node = node.children.get(block)
            if node is None or not self.has_block(node):
                break
            following.append(node)
        for taken in self.checkpoints.take_over(row, following):
            self._go_on_from(row, taken)
        registered = last.depth * BLOCK_TOKENS if (last := _last_registered(row)) else 0
        return next((key for cut, key in row.prefix_keys.items() if cut > registered), None)

    def _go_on_from(self, row: KVRow, node: PrefixNode) -> None:
        """Makes a node the last block of a row."""
        self._register(row, node)
        row.node, row.computed = node, node.depth * BLOCK_TOKENS

    def has_block(self, node: PrefixNode) -> bool:
        """Whether the keys and values of a node's block are in memory in every layer group."""
        return FREED not in node.block_ids[: len(self.groups)]

    # -- figures and checks ----------------------------------------------------------------------

    @property
    def smallest_budget(self) -> int:
        """Bytes that a row of one block needs."""
        return self.block_bytes + self.own_bytes

    @property
    def tokens_used(self) -> int:
        """Tokens in the blocks that rows read. Tokens of a shared block count once."""
        used: dict[int, int] = {}
        for row in self.rows:
            for block, block_id in enumerate(row.tables[0][: blocks_for(row.computed)]):
                used[block_id] = max(used.get(block_id, 0), min(BLOCK_TOKENS, row.computed - block * BLOCK_TOKENS))
        used.pop(FREED, None)
        return sum(used.values())

    def check_integrity(self) -> None:
        """Raises AssertionError if rows, blocks, cached prefixes and the budget disagree."""
        super().check_integrity()
        for row in self.rows:
            frozen = row.node.depth if row.node is not None and row.node.alive else 0
            assert frozen * BLOCK_TOKENS <= row.computed
            assert len({len(table) for table in row.tables[: len(self.groups)]}) == 1
            assert row.computed <= len(row.tables[0]) * BLOCK_TOKENS
            assert row.to_redo or self.holds(row, row.computed)
            for group, table in zip(self.groups, row.tables, strict=False):
                assert FREED not in table[table.count(FREED) :], "blocks are given back from the beginning"
                assert all(group.allocator.is_private(block_id) for block_id in table[blocks_for(row.computed) :])
                if frozen and row.node is not None:
                    assert table[frozen - 1] in (FREED, row.node.block_ids[group.number])

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise ValueError(f"a row of {tokens} tokens is longer than the limit of {self.max_length}")

    def _check_held(self, row: KVRow, length: int) -> None:
        if not self.holds(row, length):
            raise ValueError(
                f"a row cannot go on after {length} tokens: a sliding window has given back blocks of them, "
                "or the recurrent state there is gone"
            )


def _ancestor(node: PrefixNode | None, depth: int) -> PrefixNode | None:
    """The node of a chain at `depth`, or the last one if it is not so deep. None for the root."""
    while node is not None and node.depth > depth:
        node = node.parent
    return node if node is not None and node.depth else None


def _last_registered(row: KVRow) -> PrefixNode | None:
    return row.node if row.node is not None and row.node.alive else None


def _ids_of_block(ids: Sequence[int], block: int) -> tuple[int, ...] | None:
    """The ids of a block that leaves at least one id after it; None if there is none."""
    start = block * BLOCK_TOKENS
    return tuple(ids[start : start + BLOCK_TOKENS]) if start + BLOCK_TOKENS < len(ids) else None
