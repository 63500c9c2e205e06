"""Rows and the prefix index: which cached blocks a new row starts with, and which of a row's blocks are registered."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS, FREED
from mlx_parallm.batch.kv.memory import BlockMemory
from mlx_parallm.batch.kv.prefix import Node, first_visible
from mlx_parallm.batch.kv.row import KVRow
from mlx_parallm.batch.kv.row_states import give_checkpoint, hold, plan, take_over_checkpoint

_WORTH_COPYING = 8
"""Tokens that a partly matching block must save. To compute fewer costs about as much as to copy the block."""


def attach(memory: BlockMemory, row: KVRow, root: Hashable, ids: Sequence[int]) -> tuple[KVRow, int] | None:
    """Starts a new row with the longest cached chain of `ids`. At least the last id is left to compute.

    Returns:
        A row that holds only the cached block whose first tokens come next, and how many of its tokens are to be
        copied. The caller closes it before `row`. None if there is no block that is worth copying.
    """
    chain = memory.index.find(root, ids)
    row.computed, row.node = len(chain) * BLOCK_TOKENS, chain[-1] if chain else None
    visible = [first_visible(row.computed, group.window) for group in memory.groups]
    memory.share(row, [[FREED] * first + [node.places[g] for node in chain[first:]] for g, first in enumerate(visible)])
    if memory.states is not None:
        plan(memory, row, root, ids)
        if chain:
            hold(memory, row, chain[-1])
    if not _shares_parts(memory):
        return None
    partial, common = memory.index.find_partial(root, chain, ids)
    if partial is None or common < _WORTH_COPYING:
        return None
    donor = KVRow()
    memory.add(donor)
    memory.share(donor, [[place] for place in partial.places])
    return donor, common


def freeze(memory: BlockMemory, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
    """Registers the row's full blocks, as far as `ids` has their tokens. O(blocks that are not registered yet).

    A row whose last registered block has left the index registers all of its blocks again.
    """
    node = _last_registered(row)
    whole = min(row.computed, len(ids)) // BLOCK_TOKENS
    if whole <= (node.depth if node else 0):
        return
    node = node or memory.index.root(root)
    for start in range(node.depth * BLOCK_TOKENS, whole * BLOCK_TOKENS, BLOCK_TOKENS):
        node = memory.index.child(node, tuple(ids[start : start + BLOCK_TOKENS]))
        _register(memory, row, node)
        give_checkpoint(memory, row, node)
    row.node = node
    memory.index.prune(node)


def take_over(memory: BlockMemory, row: KVRow, root: Hashable, ids: Sequence[int]) -> Hashable:
    """Gives a row the blocks that others have registered for its next tokens. At least one id is left to compute.

    Returns:
        A key that rows have in common if they compute the same block next; None if no whole block is left. With
        recurrent layers it is the same for all blocks before the row's next cut, because only that has a checkpoint;
        a unit that brings the row there and is not read yet does not count.
    """
    if memory.states is None:
        node, following = _take_blocks(memory, row, root, ids)
        return None if following is None else (node or root, following)
    _take_checkpoint(memory, row, root, ids)
    registered = node.depth * BLOCK_TOKENS if (node := _last_registered(row)) else 0
    return next((key for cut, key in row.prefix_keys.items() if cut > registered), None)


def _take_blocks(
    memory: BlockMemory, row: KVRow, root: Hashable, ids: Sequence[int]
) -> tuple[Node | None, tuple[int, ...] | None]:
    """Gives a row the blocks that follow its own. Returns the node of its last block, None if it has none, and the ids
    of the next block, None if no whole one is left."""
    node = _last_registered(row) or memory.index.existing_root(root)
    depth = node.depth if node else 0
    while (following := _ids_of_block(ids, depth)) is not None and depth == row.computed // BLOCK_TOKENS:
        child = node.children.get(following) if node else None
        if child is None or FREED in child.places:
            break
        _register(memory, row, child)
        row.node, row.computed, node, depth = child, child.depth * BLOCK_TOKENS, child, child.depth
    return node, following


def _take_checkpoint(memory: BlockMemory, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
    """Gives a row the blocks up to the last checkpoint beyond its own tokens, and the state there."""
    node, following = _last_registered(row) or memory.index.existing_root(root), list[Node]()
    while node is not None and (block := _ids_of_block(ids, node.depth)) is not None:
        node = node.children.get(block)
        if node is None or FREED in node.places[: len(memory.groups)]:
            break
        following.append(node)
    for taken in take_over_checkpoint(memory, row, following):
        _register(memory, row, taken)
        row.node, row.computed = taken, taken.depth * BLOCK_TOKENS


def _ids_of_block(ids: Sequence[int], block: int) -> tuple[int, ...] | None:
    """The ids of a block that leaves at least one id after it; None if there is none."""
    start = block * BLOCK_TOKENS
    return tuple(ids[start : start + BLOCK_TOKENS]) if start + BLOCK_TOKENS < len(ids) else None


def freeze_tail(memory: BlockMemory, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
    """Registers the partly filled last block of a row that will not be written again, if rows can go on from one."""
    whole = row.computed // BLOCK_TOKENS
    tail = tuple(ids[whole * BLOCK_TOKENS : row.computed])
    if not tail or len(ids) < row.computed or not _shares_parts(memory):
        return
    parent = _last_registered(row) or memory.index.root(root)
    new = parent.depth == whole and tail not in parent.children
    if new and all(group.places.is_private(table[whole]) for group, table in memory.tables(row)):
        _register(memory, row, memory.index.child(parent, tail))
    memory.index.prune(parent)


def _shares_parts(memory: BlockMemory) -> bool:
    """Whether a row can go on from the first tokens of a cached block. They do not have the numbers in full precision
    if blocks are quantized, and there is no recurrent state within a block."""
    return memory.tails is None and memory.states is None


def _last_registered(row: KVRow) -> Node | None:
    return row.node if row.node is not None and row.node.alive else None


def _register(memory: BlockMemory, row: KVRow, node: Node) -> None:
    """Makes the row and the node of one of its blocks have the same places."""
    block = node.depth - 1
    for number, (group, table) in enumerate(memory.tables(row)):
        if table[block] == FREED:
            continue
        if node.places[number] == FREED:
            memory.index.own(node, number, table[block])
        elif node.places[number] != table[block]:
            group.places.acquire(node.places[number])
            group.places.release(table[block])
            table[block] = node.places[number]
