"""Cached blocks and states on their way between the KV pool and host memory, from which files are written.

Device thread only. Of a model with recurrent layers, a block is of use only together with a checkpoint at its end or
after it. So a checkpoint is written with all blocks before it, and read with those of them that the memory lacks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile

from mlx_parallm.kv.arena import Bytes
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.disk import BlockName, HostBlock
from mlx_parallm.kv.prefix import PrefixNode, path
from mlx_parallm.kv.row import KVRow


class HostCopies:
    """Copies cached blocks and states of a pool to host memory, and back as cached prefixes."""

    def __init__(self, cache: LoRABatchedKVCache) -> None:
        self._cache = cache

    # -- to host memory --------------------------------------------------------------------------

    def unsaved(self, most: int) -> list[tuple[PrefixNode, bool]]:
        """Up to `most` full cached blocks that were not saved, which count as saved from now on; one state may follow.

        Those used most recently come first, and a block comes before the one that follows it.

        Returns:
            Each node, and whether its recurrent state is meant instead of its block.
        """
        taken: list[tuple[PrefixNode, bool]] = []
        for node in self._unsaved_blocks() if self._cache.states is None else self._unsaved_chains():
            taken.append((node, node.saved))
            if node.saved:
                node.state_saved = True
                break
            node.saved = True
            if len(taken) == most:
                break
        return taken

    def _unsaved_blocks(self) -> Iterator[PrefixNode]:
        """Blocks that no row reads."""
        for node in reversed(self._cache.groups[0].allocator.evictable):
            if not node.saved and len(node.ids) == BLOCK_TOKENS and self._cache.has_block(node):
                yield node

    def _unsaved_chains(self) -> Iterator[PrefixNode]:
        """For each checkpoint that no row reads the blocks up to it, and then its node again, for the state. Tentative
        ones are left out."""
        states, checkpoints = self._cache.states, self._cache.checkpoints
        assert states is not None
        assert checkpoints is not None
        for node in reversed(states.allocator.evictable):
            chain = [] if node.state_saved or node in checkpoints.tentative else path(node)
            if all(each.saved or self._cache.has_block(each) for each in chain):
                yield from (each for each in chain if not each.saved)
                yield from chain[-1:]

    def read(self, node: PrefixNode, is_state: bool) -> list[Bytes]:
        """Copies a cached block, or the state at its end, in the order of `HostBlock.arrays`."""
        if is_state:
            assert self._cache.states is not None
            return self._cache.states.arena.to_host(node.block_ids[self._cache.states.number])
        arrays: dict[int, list[Bytes]] = {}
        for group in self._cache.groups:
            read = group.arena.read(node.block_ids[group.number])
            for at, layer in enumerate(group.layers):
                arrays[layer] = read[2 * at : 2 * at + 2]
        return [array for _, pair in sorted(arrays.items()) for array in pair]

    # -- from host memory ------------------------------------------------------------------------

    def wanted(self, root: Hashable, ids: Sequence[int], names: Sequence[BlockName]) -> list[BlockName]:
        """Those of the names, which are of consecutive blocks of `ids` and of a state, that a row would not find."""
        found, complete = len(self._cache.index.find(root, ids)), len(self._complete(root, ids))
        return [name for name in names if name.depth > (found if name.is_state else max(found, complete))]

    def _complete(self, root: Hashable, ids: Sequence[int]) -> list[PrefixNode]:
        """The blocks of `ids` up to the first whose keys and values are not in memory."""
        return [*takewhile(self._cache.has_block, self._cache.index.chain(root, ids))]

    def restore(self, root: Hashable, ids: Sequence[int], blocks: Sequence[HostBlock]) -> bool:
        """Makes consecutive blocks of `ids` cached prefixes, and a state that may follow them a checkpoint.

        Returns:
            False if there is no memory for them, or if a block before them is not in the index any more.
        """
        states = [block for block in blocks if block.name.is_state]
        new = [block for block in blocks if not block.name.is_state]
        if not self._cache.keep_prefixes or not self._restore_blocks(root, ids, new):
            return False
        chain, checkpoints = self._cache.index.chain(root, ids), self._cache.checkpoints
        return not states or (
            checkpoints is not None
            and all(
                state.name.depth <= len(chain) and checkpoints.restore(chain[state.name.depth - 1], state.arrays)
                for state in states
            )
        )

    def _restore_blocks(self, root: Hashable, ids: Sequence[int], blocks: Sequence[HostBlock]) -> bool:
        """See `restore`. Opens a row with the blocks and closes it at once."""
        cache, complete = self._cache, len(self._complete(root, ids))
        new = [block for block in blocks if block.name.depth > complete]
        if not new:
            return True
        before = cache.index.chain(root, ids)[: new[0].name.depth - 1]
        if len(before) < new[0].name.depth - 1:
            return False
        row = cache.add(KVRow())
        try:
            cache.share(row, [[node.block_ids[group.number] for node in before] for group in cache.groups])
            if not cache.make_room({group: len(new) for group in cache.groups}):
                return False
            self._write(row, len(before), new)
            row.computed = new[-1].name.depth * BLOCK_TOKENS
            cache.freeze(row, root, ids)
        finally:
            cache.remove(row)
        return True

    def _write(self, row: KVRow, first: int, blocks: Sequence[HostBlock]) -> None:
        """Appends blocks to a row that has `first` of them."""
        first_array = {layer: 2 * number for number, layer in enumerate(self._cache.layout.attention)}
        for group in self._cache.groups:
            group.allocate(row, len(blocks))
            for block_id, block in zip(row.tables[group.number][first:], blocks, strict=True):
                arrays = [block.arrays[first_array[layer] + part] for layer in group.layers for part in (0, 1)]
                group.arena.write_block(block_id, arrays)
