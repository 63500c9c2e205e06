"""The prefix index: which chains are found, in which order they are evicted, and what a window gives up."""

from __future__ import annotations

from mlx_parallm.kv.blocks import FREED, BlockAllocator
from mlx_parallm.kv.prefix import PrefixIndex, PrefixNode

TEXT = [i % 97 for i in range(640)]


class Cache:
    """An index with places, and rows that are lists of nodes."""

    def __init__(self, *windows: int | None) -> None:
        self.allocators = [BlockAllocator[PrefixNode]() for _ in windows]
        for allocator in self.allocators:
            allocator.resize(100)
        self.index = PrefixIndex(self.allocators, windows)

    def add(self, root: str, ids: list[int]) -> list[PrefixNode]:
        """A row that computes `ids` and registers all of them, the partly filled end too."""
        node, row = self.index.root(root), []
        for start in range(0, len(ids), 64):
            node = self.index.child(node, tuple(ids[start : start + 64]))
            for group, allocator in enumerate(self.allocators):
                if node.block_ids[group] == FREED:
                    self.index.cache(node, group, allocator.allocate(1)[0])
                else:
                    allocator.acquire(node.block_ids[group])
            row.append(node)
        return row

    def close(self, row: list[PrefixNode]) -> None:
        for group, allocator in enumerate(self.allocators):
            for node in reversed(row):
                if node.block_ids[group] != FREED:
                    allocator.release(node.block_ids[group])

    def found(self, root: str, ids: list[int]) -> int:
        return len(self.index.find(root, ids))

    def check(self) -> None:
        self.index.check_integrity()
        for allocator in self.allocators:
            allocator.check_integrity()


def test_the_longest_chain_is_found_and_the_last_id_is_left() -> None:
    cache = Cache(None)
    cache.add("v1", TEXT[:256])
    assert [cache.found("v1", TEXT[:n]) for n in (1, 64, 65, 128, 129, 256, 257, 640)] == [0, 0, 1, 1, 2, 3, 4, 4]
    assert cache.found("v2", TEXT) == 0
    assert cache.found("v1", [*TEXT[:70], 500, *TEXT[71:]]) == 1
    assert cache.found("v1", TEXT[64:]) == 0, "the same tokens after other tokens"


def test_ids_are_compared_not_only_their_hashes() -> None:
    cache = Cache(None)
    cache.add("v1", [-1] * 64)
    assert hash(tuple([-1] * 64)) == hash(tuple([-2] * 64))
    assert cache.found("v1", [-2] * 65) == 0


def test_the_block_with_most_tokens_in_common_is_found() -> None:
    cache = Cache(None)
    cache.add("v1", [*TEXT[:64], *TEXT[64:84], 500])
    cache.add("v1", [*TEXT[:64], *TEXT[64:94], *range(600, 634)])
    chain = cache.index.find("v1", TEXT)
    node, common = cache.index.find_partial("v1", chain, TEXT)
    assert node is not None
    assert (len(chain), common, len(node.ids)) == (1, 30, 64)
    assert cache.index.find_partial("v1", chain, TEXT[:80])[1] == 15, "the last id is left to compute"
    assert cache.index.find_partial("v2", [], TEXT) == (None, 0)


def test_the_least_recently_used_chain_is_evicted_from_its_end() -> None:
    cache = Cache(None)
    one = cache.add("v1", TEXT[:192])
    two = cache.add("v1", [*TEXT[:64], *range(200, 328)])
    cache.close(one)
    cache.close(two)
    assert cache.index.evict(0, 1) == 1
    assert cache.found("v1", [*TEXT[:192], 0]) == 2
    assert cache.index.evict(0, 2) == 2
    assert cache.found("v1", [*TEXT[:192], 0]) == 1, "the block that both have in common is the last"
    assert cache.found("v1", [*TEXT[:64], *range(200, 329)]) == 2
    assert cache.index.evict(0, 100) == 2
    assert (cache.index.nodes(), cache.allocators[0].free) == ([], 100)
    cache.check()


def test_drop_ends_one_root_and_reset_all() -> None:
    cache = Cache(None)
    live = cache.add("v1", TEXT[:128])
    for root in ("v2", "v3"):
        cache.close(cache.add(root, TEXT[:192]))
    assert cache.index.drop("v2") == 192, "tokens"
    assert cache.index.drop("v2") == 0
    assert (cache.found("v2", TEXT), cache.found("v3", TEXT)) == (0, 3)
    assert cache.index.reset() == 128 + 192
    assert (cache.found("v1", TEXT), cache.found("v3", TEXT)) == (0, 0)
    assert (cache.allocators[0].used, cache.allocators[0].free) == (2, 98), "the live row keeps its blocks"
    assert not any(node.alive for node in live)
    cache.check()


def test_a_window_that_gave_blocks_up_is_used_only_where_the_rest_is_enough() -> None:
    cache = Cache(None, 100)  # a token at 64 * n attends to the last two blocks
    row = cache.add("v1", TEXT[:384])
    for node in row[:3]:  # the row is past these
        cache.allocators[1].release(node.block_ids[1])
    assert cache.found("v1", TEXT) == 6
    assert cache.index.evict(1, 2) == 2
    assert [node.block_ids[1] == FREED for node in row] == [True, True, False, False, False, False]
    assert [cache.found("v1", TEXT[: 64 * n + 1]) for n in range(1, 7)] == [0, 0, 0, 4, 5, 6]
    cache.check()
