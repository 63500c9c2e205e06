"""A random walk over the KV pool in which every token's content tells all tokens before it.

`install` replaces the arenas' arrays by lists of tags. The tag of a token is a hash of its root, its id and all ids
before it, as its keys and values are. So a row that reads a block of other tokens is noticed at once. A recurrent state
is the tag of the row's last token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_parallm.kv import memory
from mlx_parallm.kv.blocks import BLOCK_TOKENS, FREED, blocks_for
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory, MemoryAccount
from mlx_parallm.kv.prefix import first_visible
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.layer_state import KVLayout, LayerSpec, LayerState, RecurrentSpec

FULL, WINDOWED = LayerSpec(1, 2, 2), LayerSpec(1, 2, 2, window=100)
RECURRENT = RecurrentSpec(((1,),), (mx.float32,))


class TagArena:
    """An arena whose blocks hold 64 tags, and count one byte for each layer.

    `refuse`: how often an allocation fails.
    """

    refuse = 0.0
    rng = random.Random(0)

    def __init__(self, specs: Sequence[LayerSpec], _dtype: mx.Dtype, _bytes_elsewhere: int = 0) -> None:
        self.block_bytes = len(specs)
        self.tags: list[list[int]] = []
        self.goal = 0

    @property
    def blocks(self) -> int:
        return len(self.tags)

    @property
    def array_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def resize(self, blocks: int, most_bytes: float = math.inf) -> bool:
        self.goal = blocks
        del self.tags[blocks:]
        if blocks > self.blocks:
            self._allocate()
            if most_bytes < math.inf and self.rng.random() < 0.5:
                return False
        self.tags += [[0] * BLOCK_TOKENS for _ in range(blocks - self.blocks)]
        return most_bytes > 1

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._allocate()
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            self.tags[target] = list(self.tags[source])

    def _allocate(self) -> None:
        if self.rng.random() < self.refuse:
            raise RuntimeError("[malloc] Unable to allocate 1024 bytes.")


class TagStates(TagArena):
    """An arena of states: the first tag of a place is that of the last token before the state."""

    def __init__(self, specs: Sequence[RecurrentSpec]) -> None:
        super().__init__(specs, mx.float32)  # type: ignore[arg-type]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Arena", TagArena)
    monkeypatch.setattr(memory, "StateArena", TagStates)
    monkeypatch.setattr(TagArena, "refuse", 0.0)


class Live:
    """A live row and its tokens: the first `row.computed` are computed."""

    def __init__(self, row: KVRow, root: str, ids: Sequence[int]) -> None:
        self.row, self.root = row, root
        self.ids: list[int] = []
        self.tags: list[int] = []
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        self.ids.append(token)
        self.tags.append(hash((self.tags[-1] if self.tags else self.root, token)))

    def cut(self, length: int) -> None:
        del self.ids[length:], self.tags[length:]


class PoolWalk:
    """Random operations on a pool. `step` makes one and checks everything.

    Args:
        layers: the layers of the model.
        blocks: the budget, in blocks of all layers.
        refuse: how often the device has no memory.
        bits: whether, and how, full blocks are quantized.
    """

    def __init__(
        self,
        seed: int,
        layers: Sequence[LayerState],
        blocks: int = 40,
        refuse: float = 0.0,
        bits: int | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.refuse = refuse
        TagArena.rng, TagArena.refuse = self.rng, refuse
        wide = (replace(s, head_dim_k=32, head_dim_v=32) if isinstance(s, LayerSpec) else s for s in layers)
        layout = KVLayout(tuple(wide), mx.float32, bits)
        self.cache = LoRABatchedKVCache(layout, DeviceMemory(blocks * len(layers)), 1200)
        self.texts = [[self.rng.randrange(50) for _ in range(1200)] for _ in range(2)]
        self.roots = ["base", "one"]
        self.lives: list[Live] = []

    def step(self) -> None:
        operations = {
            self.open: 3,
            self.compute: 14,
            self.freeze: 6,
            self.release_windows: 3,
            self.truncate: 1,
            self.fork: 1,
            self.close: 2.5,
            self.evict: 0.2,
            self.tidy: 1,
            self.reserve: 0.3,
            self.drop: 0.05,
            self.reset: 0.02,
            self.clear: 0.02,
        }
        operation = self.rng.choices(list(operations), list(operations.values()))[0]
        operation()
        self.check()

    # -- operations ------------------------------------------------------------------------------

    def open(self) -> None:
        rng = self.rng
        ids = rng.choice(self.texts)[: rng.randint(1, rng.choice([70, 300, 1000]))]
        if rng.random() < 0.3:
            ids = [*ids, *(rng.randrange(50) for _ in range(rng.randint(1, 60)))]
        root = rng.choice(self.roots)
        tokens = min(len(ids) + rng.choice([0, 1, 100]), self.cache.longest_row)
        try:
            row = self.cache.open(tokens, *(() if rng.random() < 0.1 else (root, ids)))
        except RuntimeError:
            assert not self.lives
            assert self.refuse
            return
        if row is None:
            assert self.lives or self.refuse, "a row that is alone is served"
            return
        assert row.computed < len(ids)
        assert len(row.tables[0]) >= blocks_for(tokens)
        self.lives.append(Live(row, root, ids))

    def compute(self) -> None:
        """Writes some of the next tokens, and draws tokens at the end of the text."""
        if (live := self.any()) is None:
            return
        row, limit = live.row, self.cache.longest_row
        end = min(row.computed + self.rng.choice([1, 1, 5, 40, 150, 500]), limit)
        if not self.extend(live, end):
            return
        while len(live.ids) < end:
            text = self.texts[live.ids[:1] == self.texts[1][:1]]  # rows with equal tokens mostly draw equal ones
            live.add(text[len(live.ids)] if self.rng.random() < 0.995 else self.rng.randrange(50))
        self.cache.reserve_checkpoint(row, end)
        for position in range(row.computed, end):
            self.write(row, position, live.tags[position])
        if self.cache.states is not None and end > row.computed:
            for place in (
                self.cache.states.block_of(row),
                *([row.checkpoints[end // BLOCK_TOKENS]] if self.keeps(row, end) else []),
            ):
                self.cache.states.arena.tags[place][0] = live.tags[end - 1]
        row.computed = end

    def keeps(self, row: KVRow, tokens: int) -> bool:
        """Whether a row keeps its state after so many tokens."""
        return tokens % BLOCK_TOKENS == 0 and tokens // BLOCK_TOKENS in row.checkpoints

    def write(self, row: KVRow, position: int, tag: int) -> None:
        """Writes a token: into the row's blocks, or into its tail, from which full blocks are copied."""
        block, offset = divmod(position, BLOCK_TOKENS)
        tail = None if self.cache.tails is None else self.cache.tails.arena.tags[self.cache.tails.block_of(row)]
        for group, table in zip(self.cache.groups, row.tables, strict=False):
            assert group.allocator.is_private(table[block]), "a block that others read is written"
            if tail is None:
                group.arena.tags[table[block]][offset] = tag
        if tail is not None:
            tail[offset] = tag
        if tail is not None and offset == BLOCK_TOKENS - 1:
            for group, table in zip(self.cache.groups, row.tables, strict=False):
                group.arena.tags[table[block]] = list(tail)

    def extend(self, live: Live, tokens: int) -> bool:
        try:
            if self.cache.extend(live.row, tokens):
                return True
        except RuntimeError:
            assert len(self.lives) == 1
            assert self.refuse
            return False
        assert len(self.lives) > 1 or self.refuse, "a row that is alone may grow"
        if self.rng.random() < 0.5:
            self.close()
        return False

    def freeze(self) -> None:
        if live := self.any():
            self.cache.freeze(live.row, live.root, live.ids)

    def release_windows(self) -> None:
        if live := self.any():
            self.cache.release_windows(live.row)

    def truncate(self) -> None:
        if (live := self.any()) is None:
            return
        length = self.rng.randint(max(0, live.row.computed - self.rng.choice([3, 100, 1000])), live.row.computed)
        if self.cache.holds(live.row, length):
            self.cache.truncate(live.row, length)
            live.cut(length)
            live.add(self.rng.randrange(50))
        else:
            with pytest.raises(ValueError, match="window"):
                self.cache.truncate(live.row, length)

    def fork(self) -> None:
        if (live := self.any()) is None:
            return
        length = self.rng.randint(0, live.row.computed)
        if not self.cache.holds(live.row, length):
            with pytest.raises(ValueError, match="window"):
                self.cache.fork(live.row, length, length)
        elif row := self.cache.fork(live.row, length, min(length + self.rng.choice([0, 80]), self.cache.longest_row)):
            assert row.computed == length or (self.cache.tails and length - BLOCK_TOKENS < row.computed < length)
            self.lives.append(Live(row, live.root, live.ids[: length + self.rng.choice([0, 1])]))

    def close(self) -> None:
        if live := self.any():
            self.lives.remove(live)
            self.cache.close(live.row, *((live.root, live.ids) if self.rng.random() < 0.7 else ()))

    def evict(self) -> None:
        before = self.cache.bytes_cached
        blocks, freed = self.rng.randint(1, 10), 0
        for group in self.cache.groups:
            freed += self.cache.evict(group, blocks - freed)
        assert freed <= before
        assert self.cache.bytes_cached < before or not freed

    def tidy(self) -> None:
        most = self.rng.choice([1, 5, 100])
        left = self.cache.tidy(most) or self.cache.tidy(most)  # the first one may complete a growth that was begun
        if not self.refuse and not left:
            for group in self.cache.groups:
                assert group.allocator.free <= max(24, 2 * group.spare_blocks())

    def reserve(self) -> None:
        device = self.cache.device
        reserved = self.rng.choice([0, 0, device.budget_bytes // 2, 10**9])
        device.open_account(MemoryAccount.ADAPTERS, lambda: reserved)
        if not self.refuse:
            self.cache.tidy(100)
            device.check_integrity()

    def drop(self) -> None:
        root = self.rng.choice(self.roots)
        self.cache.index.drop(root)
        assert self.found(root, self.texts[0]) == 0

    def reset(self) -> None:
        self.cache.index.reset()
        assert self.cache.bytes_cached == 0

    def clear(self) -> None:
        self.cache.clear()
        self.lives.clear()
        assert self.cache.bytes_held == self.cache.bytes_cached == 0

    # -- checks ----------------------------------------------------------------------------------

    def any(self) -> Live | None:
        return self.rng.choice(self.lives) if self.lives else None

    def found(self, root: Hashable, ids: Sequence[int]) -> int:
        """How many of the ids a new row starts with."""
        row = self.cache.open(0, root, ids)
        length = row.computed if row else 0
        if row:
            self.cache.close(row)
        return length

    def check(self) -> None:
        self.cache.check_integrity()
        assert list(self.cache.rows) == [live.row for live in self.lives]
        for live in self.lives:
            row = live.row
            if self.cache.states is not None and row.computed:
                assert self.cache.states.arena.tags[self.cache.states.block_of(row)][0] == live.tags[row.computed - 1]
            for group, table in zip(self.cache.groups, row.tables, strict=False):
                first = first_visible(row.computed, group.window)
                for block in range(first, blocks_for(row.computed)):
                    assert table[block] != FREED
                    start, end = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, row.computed)
                    at_end = self.cache.tails is not None and end % BLOCK_TOKENS
                    held = (
                        self.cache.tails.arena.tags[self.cache.tails.block_of(row)]
                        if at_end
                        else group.arena.tags[table[block]]
                    )
                    tags = held[: end - start]
                    assert tags == live.tags[start:end], f"block {block} of a row has other tokens"
