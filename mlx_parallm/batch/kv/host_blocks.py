"""Cached blocks on their way between the KV pool and host memory, from which files are written. Device thread only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice, takewhile

from mlx_parallm.batch.kv.arena import Bytes
from mlx_parallm.batch.kv.block_files import HostBlock
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS, FREED
from mlx_parallm.batch.kv.groups import KVRow
from mlx_parallm.batch.kv.memory import BlockMemory
from mlx_parallm.batch.kv.prefix import Node
from mlx_parallm.batch.kv.row_prefixes import freeze


def unsaved(memory: BlockMemory, most: int) -> list[Node]:
    """Up to `most` full cached blocks that no row reads and that are not `saved`.

    Those used most recently come first, and a block comes before the one that follows it.
    """
    idle = reversed(memory.groups[0].places.idle)
    wanted = (n for n in idle if not n.saved and len(n.ids) == BLOCK_TOKENS and FREED not in n.places)
    return list(islice(wanted, most))


def to_host(memory: BlockMemory, node: Node) -> list[Bytes]:
    """Copies the keys and values of a cached block, in the order of `HostBlock.arrays`."""
    arrays: dict[int, list[Bytes]] = {}
    for group, place in zip(memory.groups, node.places, strict=True):
        read = group.arena.read(place)
        for at, layer in enumerate(group.layers):
            arrays[layer] = read[2 * at : 2 * at + 2]
    return [array for _, pair in sorted(arrays.items()) for array in pair]


def restore(memory: BlockMemory, root: Hashable, ids: Sequence[int], blocks: Sequence[HostBlock]) -> bool:
    """Registers consecutive blocks of `ids` as cached prefixes, by opening a row with them and closing it at once.

    Returns:
        False if there is no memory for them, or if a block before them is not in the index any more.
    """
    chain = memory.index.chain(root, ids)
    complete = len(list(takewhile(lambda node: FREED not in node.places, chain)))
    new = [block for block in blocks if block.name.depth > complete]
    if not new:
        return True
    before = chain[: new[0].name.depth - 1]
    if len(before) < new[0].name.depth - 1:
        return False
    row = KVRow()
    memory.add(row)
    try:
        memory.share(row, [[node.places[group] for node in before] for group in range(len(memory.groups))])
        if not memory.make_room(len(new), alone=False):
            return False
        for group, table in memory.tables(row):
            table += group.places.take(len(new))
            for place, block in zip(table[len(before) :], new, strict=True):
                arrays = [block.arrays[2 * layer + part] for layer in group.layers for part in (0, 1)]
                group.arena.write_block(place, arrays)
        row.computed = new[-1].name.depth * BLOCK_TOKENS
        row.node = before[-1] if before else None
        freeze(memory, row, root, ids)
    finally:
        memory.close(row)
    return True
