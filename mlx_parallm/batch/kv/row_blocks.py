"""How rows get their blocks: free ones, copies of partly filled ones, and those that they share with another row."""

from __future__ import annotations

from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS, FREED, blocks_for
from mlx_parallm.batch.kv.memory import BlockMemory
from mlx_parallm.batch.kv.prefix import Node, first_visible
from mlx_parallm.batch.kv.row import KVRow
from mlx_parallm.batch.kv.row_states import fork_state


def reserve(memory: BlockMemory, row: KVRow, tokens: int, alone: bool) -> bool:
    """Appends free blocks to a row until it has room for `tokens`, and gives it a tail and a state if it needs them.

    Returns False, and raises, as `LoRABatchedKVCache.extend` does. `alone`: no other row is open.
    """
    blocks = max(0, blocks_for(tokens) - len(row.tables[0]))
    lacks_own = _lacks_own(memory, row)
    if not blocks and not lacks_own:
        return True
    if not memory.make_room(blocks, alone, int(lacks_own)):
        return False
    if blocks:
        for group, table in memory.tables(row):
            table += group.places.take(blocks, after=table[-1] if table else FREED)
    if lacks_own:
        _take_own(memory, row)
    return True


def _lacks_own(memory: BlockMemory, row: KVRow) -> bool:
    """Whether a row has no places of its own yet in `states` and `tails`."""
    return (memory.states is not None and row.state == FREED) or (memory.tails is not None and row.tail == FREED)


def _take_own(memory: BlockMemory, row: KVRow) -> None:
    if memory.states is not None:
        (row.state,) = memory.states.places.take(1)
    if memory.tails is not None:
        (row.tail,) = memory.tails.places.take(1)


def copy_start(memory: BlockMemory, row: KVRow, donor: KVRow, common: int, tokens: int, alone: bool) -> None:
    """Copies the first `common` tokens of a cached block to the end of a new row, if there is memory for both.

    `donor` is a row that holds only this block; it is closed.
    """
    try:
        reserved = reserve(memory, row, max(tokens, row.computed + common), alone)
        if reserved and _copy_block(memory, donor, 0, row, row.computed // BLOCK_TOKENS):
            row.computed += common
    finally:
        memory.close(donor)


def fork(memory: BlockMemory, source: KVRow, length: int, tokens: int, row: KVRow) -> bool:
    """Opens `row` with the first `length` tokens of `source` and room for `tokens`; see `LoRABatchedKVCache.fork`.

    Returns False if there is no memory; the row is closed then.
    """
    length = kept(memory, source, length)
    whole, rest = divmod(length, BLOCK_TOKENS)
    memory.add(row)
    if not memory.layout.opaque:  # else the blocks count what each row has by itself
        memory.share(row, [table[:whole] for table in source.tables])
    forked = False
    try:
        forked = reserve(memory, row, max(tokens, length), alone=False)
        forked = forked and (not rest or _copy_last(memory, source, row, whole))
        forked = forked and (memory.states is None or fork_state(memory, source, row))
    finally:
        if not forked:
            memory.close(row)
    if forked:
        row.computed, row.node, row.adapter_slot = length, ancestor(source.node, whole), source.adapter_slot
    return forked


def make_private(memory: BlockMemory, row: KVRow) -> bool:
    """Makes the partly filled last block of a row its own, if the row was truncated within a frozen block.

    The block is taken out of the prefix index if no other row reads it; otherwise the row gets a copy. Returns False as
    `LoRABatchedKVCache.extend` does.
    """
    block = row.computed // BLOCK_TOKENS
    if all(group.places.is_private(table[block]) for group, table in memory.tables(row)):
        return True
    if all(group.places.references[table[block]] == 1 for group, table in memory.tables(row)):
        for number, table in enumerate(row.tables):
            memory.index.remove(table[block], number)
        return True
    copy = KVRow()
    if not fork(memory, row, row.computed, row.computed, copy):
        return False
    row.tables, copy.tables = copy.tables, row.tables
    memory.close(copy)
    return True


def holds(memory: BlockMemory, row: KVRow, length: int) -> bool:
    """Whether `row` still has all that its token at position `length` reads: the blocks that it attends to, and the
    state before it."""
    if memory.states is not None and length != row.computed:
        return False
    length = kept(memory, row, length)
    visible = ((first_visible(length, group.window), table) for group, table in memory.tables(row))
    return all(first >= blocks_for(length) or table[first] != FREED for first, table in visible)


def kept(memory: BlockMemory, row: KVRow, length: int) -> int:
    """How many of a row's first `length` tokens can be gone on from.

    That is all of them, if full blocks are not quantized. If they are, a block cannot be written any more once the row
    has tokens after it or has filled it, because its numbers in full precision are gone. Then it is those before it.
    """
    if memory.tails is None or row.computed // BLOCK_TOKENS == length // BLOCK_TOKENS:
        return length
    return length - length % BLOCK_TOKENS


def ancestor(node: Node | None, depth: int) -> Node | None:
    """The node of a chain at `depth`, or the last one if it is not so deep. None for the root."""
    while node is not None and node.depth > depth:
        node = node.parent
    return node if node is not None and node.depth else None


def _copy_last(memory: BlockMemory, source: KVRow, row: KVRow, block: int) -> bool:
    """Copies the partly filled `block` of `source`. Returns False if the device is out of memory."""
    if memory.tails is not None:
        return memory.copy(memory.tails, [source.tail], [row.tail])
    return _copy_block(memory, source, block, row, block)


def _copy_block(memory: BlockMemory, source: KVRow, block: int, row: KVRow, target: int) -> bool:
    """Copies one block of `source` in all groups. Returns False if the device is out of memory."""
    pairs = zip(memory.tables(source), row.tables, strict=True)
    return all(memory.copy(group, [table[block]], [own[target]]) for (group, table), own in pairs)
