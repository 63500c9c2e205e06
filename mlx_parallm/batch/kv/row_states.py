"""The recurrent states of rows, and the checkpoints from which other rows can go on.

    state of a row     after its last token; each forward pass replaces it
    checkpoint         after the last token of a block; a node of the prefix index owns it, and new rows begin with it

A state cannot be brought back to fewer tokens, so a cached prefix is of use only up to a block with a checkpoint.
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

from collections.abc import Hashable, Sequence
from itertools import islice

from mlx_parallm.batch.kv.arena import Bytes
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS, FREED
from mlx_parallm.batch.kv.memory import BlockMemory
from mlx_parallm.batch.kv.prefix import Node
from mlx_parallm.batch.kv.row import KVRow

_FIRST_TENTATIVE = 4
"""Blocks up to the first tentative checkpoint, unless the first message ends before that."""

_TENTATIVE_SHARE = 1 / 8
"""The share of the pool's memory that tentative checkpoints may take."""


def plan(memory: BlockMemory, row: KVRow, root: Hashable, ids: Sequence[int]) -> None:
    """Sets the token counts at which the chunks of a new row have to end, because the row leaves a checkpoint there."""
    last = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    shared = len(memory.index.chain(root, ids)) * BLOCK_TOKENS
    row.tentative = {cut for cut in _likely_shared(memory, ids) if shared < cut < last}
    row.cuts = tuple(sorted(cut for cut in {shared, last, *row.tentative} if cut > row.computed))
    row.prefix_keys = {cut: (root, cut, hash(tuple(ids[:cut]))) for cut in row.cuts}


def _likely_shared(memory: BlockMemory, ids: Sequence[int]) -> set[int]:
    """The token counts of a prompt's tentative checkpoints. Some may be beyond its end.

    A message ends before a control token. Those in the first block begin the first message.
    """
    rest = islice(enumerate(ids), BLOCK_TOKENS, None)
    first = next((at for at, id in rest if id in memory.control_ids), 0) // BLOCK_TOKENS or _FIRST_TENTATIVE
    longer = {first << times for times in range(len(ids).bit_length())}
    shorter = {first >> times for times in range(first.bit_length())}
    return {blocks * BLOCK_TOKENS for blocks in longer | shorter if blocks >= min(first, _FIRST_TENTATIVE)}


def hold(memory: BlockMemory, row: KVRow, node: Node) -> None:
    """Keeps the checkpoint with which a new row begins, until `begin`."""
    assert memory.states is not None
    place = _checkpoint(memory, node)
    memory.states.places.acquire(place)
    memory.tentative.pop(node, None)
    row.checkpoints[node.depth] = place


def begin(memory: BlockMemory, row: KVRow) -> bool:
    """Copies the checkpoint that a new row holds, if it does, to the row's own state, and lets go of it. Returns False
    if the device is out of memory."""
    copied = all(_copied(memory, place, row) for place in row.checkpoints.values())
    drop_checkpoints(memory, row)
    return copied


def fork_state(memory: BlockMemory, source: KVRow, row: KVRow) -> bool:
    """Copies the state of a row to that of a new one. Returns False if the device is out of memory."""
    return _copied(memory, source.state, row)


def reserve_checkpoint(memory: BlockMemory, row: KVRow, tokens: int) -> None:
    """Takes a place for the row's state after `tokens` tokens, if these are whole blocks and there is memory. The pass
    that ends there puts the state into it."""
    block, rest = divmod(tokens, BLOCK_TOKENS)
    if rest or block in row.checkpoints or (tokens in row.tentative and not _most_tentative(memory)):
        return
    if memory.make_room_for_checkpoint():
        assert memory.states is not None
        (row.checkpoints[block],) = memory.states.places.take(1)


def _most_tentative(memory: BlockMemory) -> int:
    """How many tentative checkpoints there may be."""
    assert memory.states is not None
    return int(_TENTATIVE_SHARE * memory.device.pool_limit(alone=False)) // memory.states.arena.block_bytes


def give_checkpoint(memory: BlockMemory, row: KVRow, node: Node) -> None:
    """Gives a node the checkpoint that the row has made at its end, if it has made one.

    A row keeps the checkpoints that were planned, and of the others the last one.
    """
    if memory.states is None or (place := row.checkpoints.pop(node.depth, None)) is None:
        return
    if _checkpoint(memory, node) == FREED:
        memory.index.own(node, memory.states_number, place)
        memory.tentative.pop(node, None)
        if node.depth * BLOCK_TOKENS in row.tentative:
            memory.tentative[node] = None
            while len(memory.tentative) > _most_tentative(memory):
                oldest = next(iter(memory.tentative))
                del memory.tentative[oldest]
                memory.index.give_up(oldest, memory.states_number)
        elif node.depth * BLOCK_TOKENS not in row.cuts:
            if row.newest is not None:
                memory.index.give_up(row.newest, memory.states_number)
            row.newest = node
    memory.states.places.release(place)


def take_over_checkpoint(memory: BlockMemory, row: KVRow, nodes: Sequence[Node]) -> Sequence[Node]:
    """Of the nodes that follow a row's registered blocks, those up to the last checkpoint beyond its own tokens, which
    becomes the row's state. Empty if there is no such checkpoint."""
    usable = [
        depth
        for depth, node in enumerate(nodes, 1)
        if _checkpoint(memory, node) != FREED and node.depth * BLOCK_TOKENS > row.computed
    ]
    if not usable or not _copied(memory, _checkpoint(memory, nodes[usable[-1] - 1]), row):
        return ()
    return nodes[: usable[-1]]


def restore_checkpoint(memory: BlockMemory, node: Node, arrays: Sequence[Bytes]) -> bool:
    """Gives a node a checkpoint that was read from the disk. Returns False if there is no room for it."""
    if _checkpoint(memory, node) != FREED:
        return True
    if not memory.make_room_for_checkpoint() or not node.alive:
        return False
    assert memory.states is not None
    (place,) = memory.states.places.take(1)
    try:
        memory.states.arena.from_host(place, arrays)
        memory.index.own(node, memory.states_number, place)
    finally:
        memory.states.places.release(place)
    return True


def drop_checkpoints(memory: BlockMemory, row: KVRow) -> None:
    """Lets go of the checkpoints that no node has got."""
    if memory.states is not None:
        for place in row.checkpoints.values():
            memory.states.places.release(place)
    row.checkpoints.clear()


def _checkpoint(memory: BlockMemory, node: Node) -> int:
    """The place of the states at the end of a node's block, or FREED."""
    return node.places[memory.states_number]


def _copied(memory: BlockMemory, place: int, row: KVRow) -> bool:
    assert memory.states is not None
    return memory.copy(memory.states, [place], [row.state])
