"""The prefix index: finds cached blocks by the tokens that they hold and all tokens before them.

    root (adapter version, salt) ── 64 ids ── 64 ids ── 64 ids
                                 │                   └─ 12 ids        a tail: the partly filled end of a row
                                 └─ 64 ids

A node stands for the block of tokens that follows its parent's. Nodes are found by comparing ids, never by a hash
alone. A node has one block id for each layer group. A group with a sliding window may have evicted its block, so a row
can start only with a prefix at whose end each window's blocks are still there. The states of recurrent layers are a
group whose window is the last block: its block id is that of the state at the node's end, if there is a checkpoint.

A row releases its blocks from the last to the first. So in a group that attends to all tokens, a node is cached before
its parent, and the least recently used node has no children, with one exception: two rows share blocks that are not
registered yet, one of them registers these below a block that the index has already, and the other one keeps its own
instead of that block. Then the index may evict a node whose children are still read. It forgets them too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from mlx_parallm.kv.blocks import BLOCK_TOKENS, FREED, BlockAllocator

LAST_BLOCK = BLOCK_TOKENS + 1
"""A window with which the token after a block sees that block and no other whole one."""

_CHILDREN_TRIED = 16
"""How many of a node's newest children are compared with a prompt that has no whole block in common with any."""


@dataclass(eq=False, slots=True, repr=False)
class PrefixNode:
    """One block of tokens of a cached prefix.

    `block_ids`: its block in each layer group, or FREED. `depth`: blocks from the root to this one, itself included,
    and 0 of the root. `alive`: whether the index still has it. `key`: the name of its file, b"" before it is known; see
    `disk`. `saved`, `state_saved`: whether the block, and the recurrent state at its end, need not be written to
    the disk.
    """

    root: Hashable
    parent: PrefixNode | None
    ids: tuple[int, ...]
    block_ids: list[int]
    depth: int
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    alive: bool = True
    key: bytes = b""
    saved: bool = False
    state_saved: bool = False


def path(node: PrefixNode) -> list[PrefixNode]:
    """The nodes from the first block of a chain to this one."""
    nodes: list[PrefixNode] = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def first_visible(length: int, window: int | None) -> int:
    """The first block that a token at position `length` or later attends to."""
    return 0 if window is None else max(0, length + 1 - window) // BLOCK_TOKENS


class PrefixIndex:
    """Chains of cached blocks.

    Args:
        allocators: that of each layer group.
        windows: each group's window in tokens; None if its layers attend to all tokens.
    """

    def __init__(self, allocators: Sequence[BlockAllocator[PrefixNode]], windows: Sequence[int | None]) -> None:
        self._allocators = allocators
        self._windows = windows
        self._roots: dict[Hashable, PrefixNode] = {}

    # -- lookup ----------------------------------------------------------------------------------

    def find(self, root: Hashable, ids: Sequence[int]) -> list[PrefixNode]:
        """The longest usable chain of whole blocks that hold the start of `ids`. At least one id is left to compute."""
        chain = self.chain(root, ids)
        return chain[: self._usable(chain)]

    def chain(self, root: Hashable, ids: Sequence[int]) -> list[PrefixNode]:
        """All nodes of whole blocks that start `ids`, also where windows have evicted theirs."""
        chain: list[PrefixNode] = []
        node = self._roots.get(root)
        for start in range(0, len(ids) - BLOCK_TOKENS, BLOCK_TOKENS):
            node = node.children.get(tuple(ids[start : start + BLOCK_TOKENS])) if node else None
            if node is None:
                break
            chain.append(node)
        return chain

    def _usable(self, chain: Sequence[PrefixNode]) -> int:
        """With how many blocks of `chain` a row can start, because its next token finds every block it attends to."""
        usable, present = 0, [0] * len(self._windows)  # `present`: blocks up to here without a gap, for each group
        for depth, node in enumerate(chain, start=1):
            present = [0 if block_id == FREED else n + 1 for n, block_id in zip(present, node.block_ids, strict=True)]
            seen = (depth - first_visible(depth * BLOCK_TOKENS, window) for window in self._windows)
            if all(n >= blocks for n, blocks in zip(present, seen, strict=True)):
                usable = depth
        return usable

    def find_partial(
        self, root: Hashable, chain: Sequence[PrefixNode], ids: Sequence[int]
    ) -> tuple[PrefixNode | None, int]:
        """The block after `chain` whose beginning agrees longest with the rest of `ids`, and the number of tokens that
        agree. At least one id is left to compute."""
        parent = chain[-1] if chain else self._roots.get(root)
        start = len(chain) * BLOCK_TOKENS
        rest = ids[start : min(start + BLOCK_TOKENS, len(ids) - 1)]
        best, most = None, 0
        for child in islice(reversed(parent.children.values()) if parent else (), _CHILDREN_TRIED):
            if FREED not in child.block_ids and (common := _common(child.ids, rest)) > most:
                best, most = child, common
        return best, most

    # -- changes ---------------------------------------------------------------------------------

    def root(self, key: Hashable) -> PrefixNode:
        """The root of a chain, which is made if it is not there."""
        if (root := self._roots.get(key)) is None:
            root = self._roots[key] = PrefixNode(key, None, (), [FREED] * len(self._allocators), 0)
        return root

    def existing_root(self, key: Hashable) -> PrefixNode | None:
        """The root of a chain, if it is there."""
        return self._roots.get(key)

    def child(self, parent: PrefixNode, ids: tuple[int, ...]) -> PrefixNode:
        """The node of `ids` below `parent`. A new one has no block ids yet."""
        if (node := parent.children.get(ids)) is None:
            node = PrefixNode(parent.root, parent, ids, [FREED] * len(self._allocators), parent.depth + 1)
            parent.children[ids] = node
        return node

    def cache(self, node: PrefixNode, group: int, block_id: int) -> None:
        """Caches a block of `group`, which a row uses, as the node's."""
        node.block_ids[group] = block_id
        self._allocators[group].cache(block_id, node)

    def evict(self, group: int, count: int) -> int:
        """Frees up to `count` evictable blocks of a layer group, the least recently used first. Returns how many.

        A group without a window drops whole nodes. A group with one drops its own blocks.
        """
        allocator = self._allocators[group]
        before = allocator.free
        while allocator.evictable and allocator.free - before < count:
            node = next(iter(allocator.evictable))
            if self._windows[group] is None:
                self._remove(node)
            else:
                self.drop_block(node, group)
        return allocator.free - before

    def drop_block(self, node: PrefixNode, group: int) -> None:
        """Frees a node's block in a group with a window, unless a row reads it or it is not there any more."""
        block_id = node.block_ids[group]
        if block_id != FREED and not self._allocators[group].references[block_id]:
            self._allocators[group].uncache(block_id)
            node.block_ids[group] = FREED
            self.prune(node)

    def _remove(self, node: PrefixNode) -> None:
        """Removes a node with all that follows it, and its ancestors that are left without children and blocks."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.ids]
        self._forget(node)
        self.prune(parent)

    def prune(self, node: PrefixNode) -> None:
        """Removes a node without children and blocks, and its ancestors that are left so."""
        while not node.children and node.alive and all(block_id == FREED for block_id in node.block_ids):
            node.alive = False
            if node.parent is None:
                del self._roots[node.root]
                return
            del node.parent.children[node.ids]
            node = node.parent

    def remove(self, block_id: int, group: int) -> None:
        """Removes the node that a block is cached for, if it is, with all that follows it."""
        if (node := self._allocators[group].cached_by.get(block_id)) is not None:
            self._remove(node)

    def roots(self) -> list[Hashable]:
        """The keys of all roots."""
        return list(self._roots)

    def drop(self, key: Hashable) -> int:
        """Removes a root with all its chains. Returns how many tokens they held.

        Rows keep the blocks that they read. A row that continues registers its blocks again.
        """
        root = self._roots.pop(key, None)
        return self._forget(root) if root else 0

    def reset(self) -> int:
        """Removes everything, as `drop` does. Returns how many tokens there were."""
        return sum(map(self.drop, self.roots()))

    def _forget(self, top: PrefixNode) -> int:
        """Takes the blocks from a node and from all nodes below it. Returns how many tokens they held."""
        nodes = list(_below(top))
        for node in nodes:
            node.alive = False
            node.children = {}
            for group, block_id in enumerate(node.block_ids):
                if block_id != FREED:
                    self._allocators[group].uncache(block_id)
                    node.block_ids[group] = FREED
        return sum(len(node.ids) for node in nodes)

    # -- figures ---------------------------------------------------------------------------------

    def nodes(self) -> list[PrefixNode]:
        """Every node except the roots, parents first."""
        return [node for root in self._roots.values() for node in _below(root) if node.parent is not None]

    def check_integrity(self) -> None:
        """Raises AssertionError if nodes and allocators disagree."""
        named: list[dict[int, PrefixNode]] = [{} for _ in self._allocators]
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert node.alive
            assert parent.children[node.ids] is node
            assert node.depth == parent.depth + 1
            assert len(node.ids) == BLOCK_TOKENS or not node.children, "a tail has children"
            assert node.children or any(block_id != FREED for block_id in node.block_ids)
            for group, block_id in enumerate(node.block_ids):
                if block_id != FREED:
                    named[group][block_id] = node
        assert all(root.children and root.alive for root in self._roots.values())
        assert named == [allocator.cached_by for allocator in self._allocators]


def _below(top: PrefixNode) -> Iterable[PrefixNode]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements at the start of both sequences are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
