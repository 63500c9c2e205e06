"""Cached blocks and states on their way between the KV pool and host memory, from which files are written.

Device thread only. Of a model with recurrent layers, a block is of use only together with a checkpoint at its end or
after it. So a checkpoint is written with all blocks before it, and read with those of them that the memory lacks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile

from mlx_parallm.batch.kv.arena import Bytes
from mlx_parallm.batch.kv.block_files import BlockName, HostBlock
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS, FREED
from mlx_parallm.batch.kv.memory import BlockMemory
from mlx_parallm.batch.kv.prefix import Node, path
from mlx_parallm.batch.kv.row import KVRow
from mlx_parallm.batch.kv.row_prefixes import freeze
from mlx_parallm.batch.kv.row_states import restore_checkpoint


def unsaved(memory: BlockMemory, most: int) -> list[tuple[Node, bool]]:
    """Up to `most` full cached blocks that were not saved, which count as saved from now on; one state may follow.

    Those used most recently come first, and a block comes before the one that follows it.

    Returns:
        Each node, and whether its recurrent state is meant instead of its block.
    """
    taken: list[tuple[Node, bool]] = []
    for node in _unsaved_blocks(memory) if memory.states is None else _unsaved_chains(memory):
        taken.append((node, node.saved))
        if node.saved:
            node.state_saved = True
            break
        node.saved = True
        if len(taken) == most:
            break
    return taken


def _unsaved_blocks(memory: BlockMemory) -> Iterator[Node]:
    """Blocks that no row reads."""
    for node in reversed(memory.groups[0].places.idle):
        if not node.saved and len(node.ids) == BLOCK_TOKENS and _has_block(memory, node):
            yield node


def _unsaved_chains(memory: BlockMemory) -> Iterator[Node]:
    """For each checkpoint that no row reads the blocks up to it, and then its node again, for the state. Tentative ones
    are left out."""
    assert memory.states is not None
    for node in reversed(memory.states.places.idle):
        chain = [] if node.state_saved or node in memory.tentative else path(node)
        if all(each.saved or _has_block(memory, each) for each in chain):
            yield from (each for each in chain if not each.saved)
            yield from chain[-1:]


def _has_block(memory: BlockMemory, node: Node) -> bool:
    """Whether the keys and values of a node's block are in memory in every layer group."""
    return FREED not in node.places[: len(memory.groups)]


def to_host(memory: BlockMemory, node: Node, is_state: bool) -> list[Bytes]:
    """Copies the keys and values of a cached block, or the state at its end, in the order of `HostBlock.arrays`."""
    if is_state:
        assert memory.states is not None
        return memory.states.arena.to_host(node.places[memory.states_number])
    arrays: dict[int, list[Bytes]] = {}
    for group, place in zip(memory.groups, node.places, strict=False):
        read = group.arena.read(place)
        for at, layer in enumerate(group.layers):
            arrays[layer] = read[2 * at : 2 * at + 2]
    return [array for _, pair in sorted(arrays.items()) for array in pair]


def to_read(memory: BlockMemory, root: Hashable, ids: Sequence[int], names: Sequence[BlockName]) -> list[BlockName]:
    """Those of the names, which are of consecutive blocks of `ids` and of a state, that a row would not find."""
    found, complete = len(memory.index.find(root, ids)), len(_complete(memory, memory.index.chain(root, ids)))
    return [name for name in names if name.depth > (found if name.is_state else max(found, complete))]


def _complete(memory: BlockMemory, chain: Sequence[Node]) -> list[Node]:
    """The blocks that a chain begins with whose keys and values are in memory."""
    return [*takewhile(lambda node: _has_block(memory, node), chain)]


def restore(memory: BlockMemory, root: Hashable, ids: Sequence[int], blocks: Sequence[HostBlock]) -> bool:
    """Registers consecutive blocks of `ids` as cached prefixes, and a state that may follow them as a checkpoint.

    Returns:
        False if there is no memory for them, or if a block before them is not in the index any more.
    """
    states = [block for block in blocks if block.name.is_state]
    if not _restore_blocks(memory, root, ids, [block for block in blocks if not block.name.is_state]):
        return False
    chain = memory.index.chain(root, ids)
    return all(
        state.name.depth <= len(chain) and restore_checkpoint(memory, chain[state.name.depth - 1], state.arrays)
        for state in states
    )


def _restore_blocks(memory: BlockMemory, root: Hashable, ids: Sequence[int], blocks: Sequence[HostBlock]) -> bool:
    """See `restore`. Opens a row with the blocks and closes it at once."""
    chain = memory.index.chain(root, ids)
    complete = len(_complete(memory, chain))
    new = [block for block in blocks if block.name.depth > complete]
    if not new:
        return True
    before = chain[: new[0].name.depth - 1]
    if len(before) < new[0].name.depth - 1:
        return False
    row, first_array = KVRow(), {layer: 2 * number for number, layer in enumerate(memory.layout.attention)}
    memory.add(row)
    try:
        memory.share(row, [[node.places[group] for node in before] for group in range(len(memory.groups))])
        if not memory.make_room(len(new), alone=False):
            return False
        for group, table in memory.tables(row):
            table += group.places.take(len(new))
            for place, block in zip(table[len(before) :], new, strict=True):
                arrays = [block.arrays[first_array[layer] + part] for layer in group.layers for part in (0, 1)]
                group.arena.write_block(place, arrays)
        row.computed = new[-1].name.depth * BLOCK_TOKENS
        row.node = before[-1] if before else None
        freeze(memory, row, root, ids)
    finally:
        memory.close(row)
    return True
