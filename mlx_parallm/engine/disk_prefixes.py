"""DiskPrefixes reads cached prefixes from the disk when requests arrive, and writes new ones while the device is idle.

    submit ──▶ look_up ──▶ the prompt waits ──read on a worker thread──▶ advance: into the pool ──▶ admitted

The disk is used on the worker's thread only. The device thread copies blocks to and from host memory, a part of at most
`_PART_BYTES` between two units.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.engine.memory import PrefixRoot
from mlx_parallm.engine.sequence import Sequence, SequenceStatus
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.disk import BlockName, HostBlock, PrefixStore, block_key, block_names, root_key
from mlx_parallm.kv.host import HostCopies
from mlx_parallm.kv.prefix import PrefixNode

if TYPE_CHECKING:
    from mlx_parallm.engine.requests import Request

_PART_BYTES = 16 << 20
"""Bytes of blocks that are copied to or from host memory at once. A block that is larger is copied alone; a recurrent
state comes with the blocks before it."""

_PATIENCE_S = 1.0
"""How long a prompt waits for the disk, in seconds. What was read by then is used."""


@dataclass(slots=True)
class _Lookup:
    """A prompt that waits for blocks from the disk, and for the recurrent state after them if there are such layers.

    `leader`: the first sequence of the prompt. `names`: the blocks that are not read yet. `part`: those that are being
    read, `asked` in number.
    """

    leader: Sequence
    root: Hashable
    names: Seq[BlockName]
    gives_up_at: float
    part: Future[list[HostBlock]] | None = None
    asked: int = 0


class DiskPrefixes:
    """The prefix cache's files as the device loop uses them. Device thread only.

    Attributes:
        queries, hits: tokens of prompts that were looked up here because the memory did not have them, and those that
            were read back.

    Args:
        root: where the blocks of a waiting sequence's prompt may be registered, None if nowhere.
    """

    def __init__(
        self, store: PrefixStore, cache: LoRABatchedKVCache, root: Callable[[Sequence], PrefixRoot | None]
    ) -> None:
        self.queries = self.hits = 0
        self._store = store
        self._cache = cache
        self._copies = HostCopies(cache)
        self._root = root
        self._lookups: deque[_Lookup] = deque()  # only the first one reads: it may read what the others want too
        self._part_blocks = max(1, _PART_BYTES // cache.block_bytes)

    # -- reading ---------------------------------------------------------------------------------

    def look_up(self, request: Request) -> None:
        """Makes each prompt of a new request wait if the disk has blocks that follow those in memory."""
        for group in dict.fromkeys(sequence.group for sequence in request.unfinished):
            leader = group.members[0]
            root = self._root(leader)
            if names := self._names(leader, root):
                group.awaits_prefix = True
                self._lookups.append(_Lookup(leader, root, names, time.monotonic() + _PATIENCE_S))

    def _names(self, leader: Sequence, root: Hashable) -> list[BlockName]:
        """The blocks of a prompt that follow those in memory, as far as the disk has them. With recurrent layers, they
        end with the last one that has a checkpoint, and its state follows."""
        ids, key = leader.prefix_ids, self._root_key(root)
        if key is None or not ids:
            return []
        cached = self._cache.cached(root, ids) // BLOCK_TOKENS
        self.queries += ((len(ids) - 1) // BLOCK_TOKENS - cached) * BLOCK_TOKENS
        names = [*takewhile(lambda name: name.key in self._store, islice(block_names(key, ids), cached, None))]
        if self._cache.states is None:
            return names
        while names and names[-1].of_state.key not in self._store:
            names.pop()
        return [*names, *(name.of_state for name in names[-1:])]

    def advance(self, now: float) -> None:
        """Puts the part that was read last into the pool, and begins to read the next one. Prompts for which all is
        read, and those that have waited too long, wait no longer."""
        if self._lookups and (part := self._lookups[0].part) and part.done():
            self._restore(self._lookups[0], part)
        for lookup in tuple(self._lookups):
            if now >= lookup.gives_up_at or lookup.leader.status is SequenceStatus.FINISHED:
                self._end(lookup)
        while self._lookups and self._lookups[0].part is None:
            self._read(self._lookups[0])

    def _read(self, lookup: _Lookup) -> None:
        names = self._copies.wanted(lookup.root, lookup.leader.tokens, lookup.names)
        part, lookup.names = names[: self._part_blocks], names[self._part_blocks :]
        if part:
            lookup.part, lookup.asked = self._store.read(part), len(part)
        else:
            self._end(lookup)

    def _restore(self, lookup: _Lookup, part: Future[list[HostBlock]]) -> None:
        """Registers blocks as cached prefixes. The prompt waits for more only if all that were asked for came."""
        lookup.part, complete = None, False
        root, ids = lookup.root, lookup.leader.tokens
        before = self._cache.cached(root, ids)
        try:
            blocks = part.result()
            complete = self._copies.restore(root, ids, blocks) and len(blocks) == lookup.asked
            self.hits += self._cache.cached(root, ids) - before
        finally:
            if not complete:
                self._end(lookup)

    def _end(self, lookup: _Lookup) -> None:
        lookup.leader.group.awaits_prefix = False
        self._lookups.remove(lookup)
        if lookup.part is not None:
            lookup.part.cancel()

    # -- writing ---------------------------------------------------------------------------------

    def save(self) -> bool:
        """Hands a part of the blocks that are not on the disk to the worker, unless it is still writing. Returns
        whether there were any."""
        if not self._store.may_write:
            return False
        unsaved = self._copies.unsaved(self._part_blocks)
        blocks = []
        for node, is_state in unsaved:
            if key := self._key(node):
                name = BlockName(key, node.depth, node.ids)
                name = name.of_state if is_state else name
                if name.key not in self._store:
                    blocks.append(HostBlock(name, self._copies.read(node, is_state)))
        if blocks:
            self._store.write(blocks)
        return bool(unsaved)

    def _key(self, node: PrefixNode) -> bytes | None:
        """The key of a block's file. None if blocks of its adapter version are not written."""
        path = []
        while node.parent is not None and not node.key:
            path.append(node)
            node = node.parent
        key = node.key or self._root_key(node.root)
        for below in reversed(path):
            if key is not None:
                key = below.key = block_key(key, below.ids)
        return key

    def _root_key(self, root: Hashable) -> bytes | None:
        """Identifies a version and a salt beyond the life of this process. None if the version's content is in no file
        that says what it is."""
        if not isinstance(root, PrefixRoot) or not (root.version.ref == BASE_ADAPTER or root.version.info.digest):
            return None
        ref, digest = root.version.ref, root.version.info.digest
        return root_key(self._store.model, json.dumps([ref.name, ref.version, digest, root.salt]))

    # -- state -----------------------------------------------------------------------------------

    def clear(self) -> Future[None]:
        """Removes all files. A prompt that waits for blocks gets those that were read before this."""
        return self._store.clear()

    def describe(self) -> dict[str, object]:
        """For `/debug/state`."""
        return {
            "prompts_waiting": len(self._lookups),
            "blocks_written": self._store.written,
            "damaged_files": self._store.damaged,
            "writes": self._store.writes,
        }
